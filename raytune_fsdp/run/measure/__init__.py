"""What a rank measures of its steps.

meter.py               tensors of the device become metrics
nodes.py               what the machines report about themselves
documents.py           the loss of every document in every step
against_prediction.py  what was predicted, compared with what is measured
"""
