"""The outer shell: from a config to ranks that train.

finetune.py        finetune(config) -> FinetuneResult, the whole program in one call
start.py           chooses the way: Ray, or processes on this machine
run_lock.py        one command at a time works on a run
shared_storage.py  is `run.storage` the same storage for every rank?
local.py           one rank in this process, several processes, or those of torchrun; needs no Ray
torchrun.py        what torchrun tells a process in its environment
worker.py          what every rank does, whatever started it
ray/               a run on a Ray cluster
signals.py         SIGTERM and SIGINT, in the driver and in ranks without Ray
notices.py         how long whatever may end a run leaves it for a last checkpoint
phases.py          how long a run takes until it trains
environment.py     variables that libraries need, for as long as they do
quiet.py           keeps libraries from printing
"""
