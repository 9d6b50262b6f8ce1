"""Schedulers: pure functions of a sweep's log, which say what trials may do next.

protocol.py  what all of them are, and what they say: `Scheduler`, `Stretch`, `Next`
rungs.py     successive halving by full rungs; and `none`, which lets all trials train to their ends
asha.py      successive halving without waiting for others
median.py    a trial stops when it is worse than the others were
pbt.py       population-based training: bad members go on from good ones, with changes
choose.py    the scheduler of a sweep
"""
