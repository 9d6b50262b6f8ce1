"""Adapters and the frozen weights that they change.

targets.py      which modules are adapted, in PEFT's words
dora.py         DoRA as the compiler can follow it
attach.py       PEFT's modules, and the values they begin with
principal.py    adapters that begin as the largest part of their weight (PiSSA, OLoRA)
names.py        what an adapter is called in PEFT's directory
config_file.py  reads and writes `adapter_config.json`
merge.py        merges adapters into their base, weight by weight
"""
