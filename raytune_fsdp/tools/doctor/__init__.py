"""`raytune-fsdp doctor`: is everything there that a run needs? It changes nothing, and nothing may hang it.

checkup    which checks there are; begins them together, and ends with what is known at the deadline
deadline   the time that all checks share, and a clock for what does not answer
finding    the outcome of a check; all outcomes as a page or as JSON
own_process a check in another process, which can be ended, and says when it begins to ask
with_torch checks that need torch and transformers: attention, the model, the sizes of checkpoints
node       the facts about a machine; goes to the nodes by value, so that it runs whatever they have installed
machines   checks on the facts that machines report: versions, GPUs, limits, clocks
writing    writes to storage and times it, here and on nodes
storage    writable, fast enough, with room; the run's lock; object stores
services   MLflow, the hub and its cache
cluster    the Ray cluster: its token, its nodes, its resources against the plan
network    collectives between real ranks, against what the network should do
"""
