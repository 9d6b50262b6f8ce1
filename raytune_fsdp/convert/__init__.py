"""Turn configs of other trainers into ours: `raytune-fsdp convert FILE`.

    rules.py           the parts of a table, and the state of a file while it is converted
    runs.py            options that several projects share: the run's directory, length, batch and cadences
    training.py        the options of transformers' TrainingArguments, which TRL and LLaMA-Factory take
    schedules.py       the schedules of the learning rate
    adapters.py        options of LoRA; optimizers.py: of optimizers
    sharding.py        options of FSDP
    deepspeed.py       options of DeepSpeed in axolotl, TRL and LLaMA-Factory, and its own file
    axolotl.py, trl.py, llama_factory.py, torchtune.py, accelerate.py
                       a table for each project: what becomes of every option, and the defaults that are not ours
    preferences.py     objectives of preferences and of reward models, which four of them have; trl_preferences.py,
                       axolotl_preferences.py, llama_factory_preferences.py: what each says of them
    teachers.py        distillation; trl_gkd.py, axolotl_kd.py
    axolotl_left.py    options of axolotl that do not change what is learned
    axolotl_data.py, llama_factory_data.py
                       their datasets
    llama_factory_rows.py
                       a function that a converted config may name for its rows
    file.py            converts a file: reads it, guesses the project, checks the result; older configs of ours

An option that changes what is learned is carried, or refused by name; none is lost in silence. Imports no torch.
"""
