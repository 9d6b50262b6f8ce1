"""Configs of other trainers, turned into ours: `raytune-fsdp convert FILE`.

    rules.py           what the tables are made of, and what is known of a file while it is converted
    runs.py            what several projects say of a run: its directory, length, batch and cadences
    training.py        what TRL and LLaMA-Factory take from transformers: the options of TrainingArguments
    sharding.py        what several projects say of FSDP and DeepSpeed
    axolotl.py, trl.py, llama_factory.py, accelerate.py
                       a table for each project: what becomes of every option, and the defaults that are not ours
    axolotl_data.py, llama_factory_data.py
                       their datasets
    file.py            a file in, a conversion out: reading, guessing the project, checking the result
    docs.py            docs/start/coming-from.md

What changes what is learned is carried, or refused by name; it is never lost in silence. Imports no torch.
"""
