"""Write a model directory that others load.

write.py        writes weights, or their mean over checkpoints, as `from_pretrained` and inference servers load them
adapter.py      writes an adapter as PEFT loads it
older_names.py  configs with the names of transformers 4 and 5
mark.py         where an export is written, and the mark by which a later export recognises it
"""
