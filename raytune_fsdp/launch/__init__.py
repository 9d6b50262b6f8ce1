"""The outer shell: from a config to ranks that train.

start           chooses the way: Ray, or processes on this machine
local           one rank in this process, several processes, or those of torchrun; needs no Ray
torchrun        what torchrun tells a process in its environment
worker          what every rank does, whatever started it
ray/            a run on a Ray cluster
run_lock        one command at a time works on a run
signals         SIGTERM and SIGINT, in the driver and in ranks without Ray
environment     variables that libraries need, for as long as they do
shared_storage  is `run.storage` the same storage for every rank?
phases          how long a run takes until it trains
quiet           keeps libraries from printing
"""
