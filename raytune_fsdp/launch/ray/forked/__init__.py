"""Workers of Ray that are forked from a process that has done their imports, instead of being started from scratch.

    templates.py  where a run has such a process, the template, and until when: as its driver knows it
    template.py   the template: what it imports, whom it refuses, how it forks
    ask.py        what Ray starts instead of Python: it asks the template of its node
    process.py    what a process inherits, and how a fork becomes what was asked for
    messages.py   what these processes send each other

In any doubt Python is started as usual.
"""
