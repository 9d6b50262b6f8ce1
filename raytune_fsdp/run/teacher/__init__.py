"""The teacher of a run of distillation: a model whose predictions are asked for once, before training, and kept.

find.py     which model it is, or what an earlier pass has left of it
attempt.py  what an attempt has of its predictions, and computes before it trains
passes.py   a pass over the data, by all ranks, window by window; one that was killed goes on where it was
"""
