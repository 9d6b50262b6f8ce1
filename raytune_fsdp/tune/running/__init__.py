"""The processes of a sweep's trials, and what they leave.

tied.py      a command that ends with the process which has started it
children.py  the process that trains a trial's run
cluster.py   the Ray that all trials share, where none is there
values.py    what the record of a run says
times.py     when each part ran, and how long
runner.py    what may run is started, what has ended is looked at, until the log says that the sweep is over
"""
