"""Rows -> tokens -> packed samples -> batches. Pure functions of (data, tokenizer, config, seed); knows nothing of Ray.

Read in this order: `sources` (rows of files, by number), `formats` (a row becomes a document; `chat` and `columns`
read it, `templates`, `turns` and `marks` render it and find the assistant's turns, `masks` makes tokens of it), `order`
and `mixture` (which row comes when), `packing` (documents become packed samples), `window`, `windows` and `cache` (a
fixed group of rows, the unit of data work), `census` (all of them, counted), `batches` (the endless stream and what
each rank gets of it), `skipped` (what was left out), `opening` (from a config to all this), `identity` (what decides
it).
"""
