"""Where the values of a network's tensors come from.

source.py      reads them by rows
keys.py        which key of a file is which tensor
conversion.py  tensors that transformers builds of others, and the way back
dequantize.py  stored in fewer bits, read as 16-bit numbers
"""
