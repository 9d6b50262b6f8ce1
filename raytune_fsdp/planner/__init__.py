"""What a run will need, before anything is started.

live.py     the bytes that are alive while operations run on tensors without data, and what they are
trace.py    one step of a few blocks of the network, as a run computes it, on such tensors
memory.py   from those few blocks to the whole network: the peak, where it is, and by part
"""
