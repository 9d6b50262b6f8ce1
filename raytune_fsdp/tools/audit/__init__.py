"""Train a segment of a run again and compare: a repetition proves what a record alone cannot.

    audit.py       the audit itself
    segment.py     the steps between two committed checkpoints, and their lines on record
    chain.py       the runs from which a fork comes, with the segments of a whole chain
    repeat.py      the config of the ordinary run that trains them again, in a directory of its own
    past.py        which rows a step of a run trained on
    comparison.py  compares the run and its repetition
    page.py        the outcome, for a third party

The audited run is only read.
"""
