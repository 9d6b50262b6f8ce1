"""One optimizer step, and how a model is spread over ranks to take it.

train_step.py      the step: tensors in, tensors out; what it must know of all its micro-batches first
sums.py            sums a step over micro-batches and ranks; in_order.py: with the same bits at any number of ranks
parallel.py        the mesh, and the units of sharding; precision.py: the types that a run computes in
units.py           FSDP's own record of the units
gather_fp8.py      gathers weights in 8 bits
reduce_by_node.py  sums gradients inside of nodes first; relay.py: passes sums in order from node to node
accumulation.py    adds the gradients of micro-batches
optim/             optimizers and the learning rate
operations.py      reads a network's shapes for the count of operations; flops.py: the count
traffic.py         how much a rank's collectives move
own_time.py        how long a rank spends on its own work; profiling.py: records chosen steps
"""
