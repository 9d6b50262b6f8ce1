"""The outer shell: from a config to ranks that train.

finetune.py        finetune(config) -> FinetuneResult, the whole program in one call
result.py          what that call returns
callbacks.py       what it tells the program that called it, meanwhile, and how that stops the run
own_rows.py        writes the rows that a program has in memory where a run finds them
own_functions.py   names functions that a program gives, so that ranks can import them
start.py           chooses how to launch: on Ray, or as processes on this machine
without_ray.py     what a run without Ray cannot do
run_lock.py        lets one command at a time work on a run
shared_storage.py  checks that `run.storage` is the same storage for every rank
local.py           one rank in this process, several processes, or those of torchrun; needs no Ray
examine.py         measures a model without a run, in one process or several
imported.py        refuses scripts that these processes cannot import
torchrun.py        reads what torchrun sets in a process's environment
worker.py          the work of a rank, whatever started it
ray/               a run on a Ray cluster
signals.py         SIGTERM and SIGINT, in the driver and in ranks without Ray
notices.py         how much time a run has for a last checkpoint before something ends it
phases.py          how long each phase takes until a run trains
environment.py     environment variables that libraries and processes need, set for as long as they do
importing.py       imports large libraries in less time
quiet.py           keeps libraries from printing
"""
