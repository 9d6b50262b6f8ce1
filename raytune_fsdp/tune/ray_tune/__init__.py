"""Runs as trials of Ray Tune.

reference.py   what Tune keeps of a trial, and the config of its run
trial.py       `RunTrial`: what Tune asks of a trial; the one file outside of launch/ray/ that imports Ray
driven.py      the process that trains the runs, one after another, and outlives a trial that is killed
"""
