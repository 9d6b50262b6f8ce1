"""A model directory in, a sharded network out; trained tensors in, a model directory out.

In the order of the data:

    files.py        where a model's files are (here or on the hub), and which of them holds which tensor
    network.py      its config -> the network on the meta device, and what can be read off that: blocks, shapes, types
    named_class.py  the class that a base's own config names, of which the network may be a part
    keys.py         which key in the files is which tensor of the network, and whether the two fit
    conversion.py   tensors that transformers builds from others (all experts in one), rows at a time, and the way back
    weights.py      tensors to be read by rows: from files, drawn at random, with grown embeddings
    fill.py         memory and values for the rows that this rank keeps
    attention.py    the forward pass over packed documents, and whether they see each other
    loss.py         the loss of a block
    adapter_names.py  what an adapter is called in PEFT's directory
    export.py       tensors -> a model directory, by way of
    tensorfile.py   one safetensors file, written tensor by tensor and read again
    known_files.py  which files travel from a run to an export, and to the hub
    older_names.py  config.json and tokenizer_config.json in the words of transformers 4, too
    exported.py     the mark of an export: what a later one may replace
    hub.py          a model directory -> the Hugging Face hub

Nothing here knows of runs, checkpoints, data or Ray.
"""
