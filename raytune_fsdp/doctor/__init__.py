"""`raytune-fsdp doctor`: is everything there that a run needs? Nothing is changed, and nothing may hang the command.

at_start   the cheap part of it, beside the start of every run
checkup    which checks there are; begins them together, and waits for each only as long as it may take
finding    what a check says; the page and the JSON of it
beside     a check in a process of its own, which can be ended
node       what a machine says about itself; goes to the nodes by value, so that it runs on whatever is there
machines   what is wrong with what machines say: versions, GPUs, limits, clocks
kernels    which attention the run will try
storage    writable, fast enough, with room, seen by all nodes; the run's lock; object stores
services   MLflow, the hub and its cache
cluster    the Ray cluster: its token, its nodes, its resources against the plan
bandwidth  collectives between real ranks, against what the network should do
"""
