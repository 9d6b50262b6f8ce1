"""The sections of a config, one file for each.

run.py         what a run is called, where it lives; steps to look at closely
model.py       which network, which weights, which tokenizer
data.py        which rows, in which mixture and order; formats.py: how a row becomes a document
method.py      which weights are trained
optim.py       the learning rate over time, clipping; optimizers.py: the optimizers
train.py       how much is trained, in which batches, on which loss; objectives.py: what a step minimises
reference.py   what an objective of preferences compares with; the teacher, whose predictions one of distillation learns
parallel.py    how the model is spread over the ranks, and in which precision it computes
checkpoint.py  when a run is saved, and how much of it is kept
eval.py        how often the model is measured
export.py      the model directory that a run leaves
tracking.py    where metrics go besides the run directory
cluster.py     what the run runs on
"""
