"""Work of a run on CPUs and GPUs other than its ranks'.

calls.py         many calls of a function, their results in order
stream.py        the stream and the census; batches.py: a rank's batches of it
after_commit.py  work on committed checkpoints while training goes on
evaluations.py   evaluations; exports.py: exports
"""
