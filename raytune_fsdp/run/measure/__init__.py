"""What a rank measures of its steps.

meter.py               tensors of the device become metrics
nodes.py               what the machines say of themselves
documents.py           the loss of every document in every step
against_prediction.py  what was predicted, held against what is measured
"""
