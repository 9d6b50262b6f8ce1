"""Ranks that share the tokens of a sample, or compute a layer together.

sequence.py  each rank has a part of the tokens
cuts.py      which networks can be cut, by transformers' plan; tensor.py: cuts them
dropout.py   dropout that does not depend on how many ranks share a sample
draws.py     other random draws of a network
"""
