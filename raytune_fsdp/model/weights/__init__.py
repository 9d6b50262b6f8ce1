"""Where the values of a network's tensors come from.

source.py      reads tensors by rows
keys.py        which key of a file is which tensor
conversion.py  tensors that transformers builds from others, and the way back
dequantize.py  reads weights that are stored in fewer bits as 16-bit numbers
digests.py     hashes tensors as they are stored
"""
