"""What a rank measures of its steps.

meter.py               tensors of the device become metrics
nodes.py               what the machines report about themselves
documents.py           the loss of every document in every step
digests.py             the digest of all numbers after some steps
against_prediction.py  what was predicted, compared with what is measured
own_failure.py         whether training itself has failed, or something around it
out_of_memory.py       what takes the memory of a device, and what helps a GPU that ran out of it
"""
