"""Processes of Ray that are forked from one that has done the imports, instead of being started anew.

A *template* process lives on each node of a run (template.py). Ray starts a small program where it would start Python
(ask.py, through `py_executable` of a runtime environment); this asks the template for a fork, which then is the worker.
In any doubt Python is started as usual. The driver decides where there is a template, and until when (templates.py).
"""
