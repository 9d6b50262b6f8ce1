"""A model on disk or on the hub, perhaps a stranger's.

files.py            where a model's files are; known_files.py: which of them are copied along
bounds.py           what they may ask for, and what transformers means when it refuses
named_class.py      the class that a base's own config names
scoring.py          what it says of a head that scores, and which class has one
needed_code.py      code of a user's own that a config.json needs
quantization.py     how its weights are stored in fewer bits
hub_weights.py      where weights of the hub are on a machine; hub_download.py: fetches them
tokenizer.py        its tokenizer; tokenizer_trial.py: tries it in another process, which is tokenizer_child.py
tensorfile.py       writes a safetensors file tensor by tensor
hub_push.py         pushes a directory to the hub
"""
