"""Try on a small scale what a run relies on.

needs.py         what a network needs of its attention and its loss
kernels.py       what a run computes with; mixers.py: which of its modules need documents, and how they get them
experts.py       one product for all experts
update.py        an update as one kernel: it does what its operations do
computation.py   the network itself, at every start: how far attention and loss may be off
probe.py         one step of a small part of the network
cut.py           ranks that compute layers together compute what one alone does
score_proof.py   transformers' class for scores scores texts as the head of a run does
export_proof.py  an adapter changes its base's class as it changes the network of the run
"""
