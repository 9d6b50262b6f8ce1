"""One step on tensors without data.

layers.py    which layers stand for which
trace.py     the step of those few, and its phases
live.py      the bytes that are alive in it
work.py      what one operation computes, reads and writes
"""
