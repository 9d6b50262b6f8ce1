"""A model directory in, a sharded network out; trained tensors in, a model directory out.

directory/              a model on disk or on the hub
network.py              its config -> the network on the meta device, and which weights are trained
own_network.py          or a function of the user's that builds it
score_head.py           a head that scores documents, in the place of the one that predicts tokens
layers.py               its repeated layers, and how their forward pass runs in training
adapters/               adapters and the frozen weights that they change
added_rows.py           rows of new tokens that are trained alone; tables.py: tensors of constants
attention/              kernels that keep documents apart; proof.py: measures it at every start
objective/              what a step minimises
compile_layers.py       compiled forward passes that fall back to plain ones
precision/              weights and products in fewer than 16 bits
split/                  ranks that share samples or layers
pieces/                 what a rank has of a tensor
weights/                where the values of tensors come from; fill.py: puts them into a network on the meta device
offload_activations.py  what layers keep for backward, in the host's memory
export/                 writes a model directory that others load

Nothing here knows of runs, checkpoints or Ray.
"""
