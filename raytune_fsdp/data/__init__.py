"""Rows -> tokens -> packed samples -> batches. Pure functions of (data, tokenizer, config, seed); knows nothing of Ray.

Read in this order: `sources` (rows of a file), `formats` and `chat` (a row becomes a document), `order` (keyed
permutation), `packing` (documents become packed samples), `windows` (a fixed group of rows, the unit of data work),
`batches` (the endless stream of samples and what each rank gets of it).
"""
