"""Configs of other trainers, turned into ours: `raytune-fsdp convert FILE`.

    rules.py           what the tables are made of, and what is known of a file while it is converted
    runs.py            what several projects say of a run: its directory, length, batch and cadences
    training.py        what TRL and LLaMA-Factory take from transformers: the options of TrainingArguments
    schedules.py       the schedules of the learning rate that they have
    adapters.py        what several projects say of LoRA; optimizers.py: of optimizers
    sharding.py        what several projects say of FSDP
    deepspeed.py       what axolotl, TRL and LLaMA-Factory say of DeepSpeed
    axolotl.py, trl.py, llama_factory.py, accelerate.py
                       a table for each project: what becomes of every option, and the defaults that are not ours
    axolotl_left.py    what of axolotl changes nothing of what is learned
    axolotl_adapters.py
                       what axolotl says of adapters
    axolotl_data.py, llama_factory_data.py
                       their datasets
    llama_factory_rows.py
                       a function that a converted config may name for its rows
    file.py            a file in, a conversion out: reading, guessing the project, checking the result

What changes what is learned is carried, or refused by name; it is never lost in silence. Imports no torch.
"""
