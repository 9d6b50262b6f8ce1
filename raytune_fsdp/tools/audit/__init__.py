"""Train a segment of a run again and compare: what no record can prove, its repetition can.

    audit.py       the audit itself
    segment.py     the steps between two committed checkpoints, and what is on record of them
    repeat.py      the ordinary run that trains them again, in a directory of its own
    past.py        which rows a step of a run trained on
    comparison.py  what the two have in common
    page.py        the outcome, for a third party

The run that is audited is only read.
"""
