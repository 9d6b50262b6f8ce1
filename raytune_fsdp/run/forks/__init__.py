"""A run that begins where another run, its parent, was after a step.

parent.py   finds the parent's checkpoint; the lineage that a fork writes down
changes.py  what of its parent's identity a fork may change, and what not
pins.py     files that keep the parent from pruning the checkpoint
"""
