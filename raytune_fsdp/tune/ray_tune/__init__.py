"""Runs as trials of Ray Tune.

reference.py    what Tune keeps of a trial, and the config of its run
environment.py  the environment of the process that drives the run
trial.py        `RunTrial`: what Tune asks of a trial; the one file outside of launch/ray/ that imports Ray
driven.py       that process: it trains the runs, one after another, and outlives a trial that is killed
"""
