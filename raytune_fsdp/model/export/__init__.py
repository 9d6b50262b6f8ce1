"""A model directory that others load.

write.py        weights out, as `from_pretrained` and inference servers load them
adapter.py      an adapter out, as PEFT loads it
mean.py         several networks of one shape as their mean
older_names.py  configs under the names of transformers 4 and 5
mark.py         where an export is written, and the mark by which a later one knows it
"""
