"""`raytune-fsdp doctor`: is everything there that a run needs? Nothing is changed, and nothing may hang the command.

checkup    which checks there are; begins them together, and ends with what there is at the deadline
deadline   the time that all checks share, and for how long what one asks has not answered
finding    what a check says; the page and the JSON of it
beside     a check in a process of its own, which can be ended, and says when it begins to ask
with_torch what needs torch and transformers: attention, the model, the sizes of checkpoints
node       what a machine says about itself; goes to the nodes by value, so that it runs on whatever is there
machines   what is wrong with what machines say: versions, GPUs, limits, clocks
writing    storage written to and timed, here and on nodes
storage    writable, fast enough, with room; the run's lock; object stores
services   MLflow, the hub and its cache
cluster    the Ray cluster: its token, its nodes, its resources against the plan
network    collectives between real ranks, against what the network should do
"""
