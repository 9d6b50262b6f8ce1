"""Predict what a run will need, before anything is started.

subject.py      which network a config is about, also offline (architectures.json)
devices.py      what a device has and reaches, by its maker or as it was measured
trace/          one step of a few layers of the network, on tensors without data
memory.py       from those few layers to the whole network: the peak, where it is, and its parts
links.py        what moves between devices; speed.py: how long a step takes
host.py         memory of the machines, and storage
prediction.py   all of this in one call
teacher.py      what the pass of a teacher needs before a run trains
stopping.py     how long saves and stops take, and the notice that a run would get
advise/         what may not be meant, and what would be better
planned.py      everything about a config on a cluster; search.py: the cheapest one
preflight.py    whether it will fit, before ranks are started
page/           a plan as text, as a page, and as a page with sliders
calibrate.py    what a machine does, measured
"""
