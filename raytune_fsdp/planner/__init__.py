"""What a run will need, before anything is started.

subject.py      which network a config is about, also offline
live.py         the bytes that are alive while operations run on tensors without data, and what they are
work.py         what one operation computes, reads and writes
trace.py        one step of a few blocks of the network, as a rank computes it, on such tensors (recorder.py: its
                phases; representatives.py: which blocks stand for which)
memory.py       from those few blocks to the whole network: the peak, where it is, and by part
speed.py        how long a step takes on a device; links.py: what moves between them, and how long
calibrate.py    what a machine does, measured; real_step.py: steps of a model without a run
prediction.py   all of that in one call
alternatives.py other ways to train the same, beside.py: hosts and storage, advice.py: what may not be meant
stopping.py     how long saves and stops take, beside the notice that a run would get
planned.py      everything about a config on a cluster; page.py: as a page, and as data
web/           the same as a page with sliders: from a server of this machine, or one file with everything inside
"""
