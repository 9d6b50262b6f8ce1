"""Measure what a run's model is worth.

evaluation.py  what an evaluation consists of
losses.py      the loss on each dataset
score_figures.py  what scores and classes of a dataset are worth
answers.py     what the model answers
tasks.py       questions with known answers
harness.py     tasks of lm-evaluation-harness, as that tool measures them
owed.py        what ranks measure, and which evaluation the run still owes
early_stop.py  when a run ends before its last step
"""
