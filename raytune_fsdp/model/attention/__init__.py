"""Attention that keeps the documents of a sample apart.

choose.py        which attention a network gets, and what a forward pass hands to it
kernels.py       functions that transformers calls by name; flash.py: those of flash attention
calls.py         what a kernel is called with, and attention by the book to compare with
lengths.py       where a document's loss would depend on the lengths of its neighbours
mixers.py        has state spaces, delta rules and convolutions start from nothing with each document
kernel_trial.py  tries a kernel before a run relies on it
"""
