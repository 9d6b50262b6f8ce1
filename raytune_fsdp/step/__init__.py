"""One optimizer step, and how a model is spread over ranks to take it.

train_step.py      tensors in, tensors out
parallel.py        the mesh, and the units of sharding; precision.py: in which types a run computes
gather_fp8.py      gathers weights as 8 bits
reduce_by_node.py  sums gradients inside of nodes first
accumulation.py    adds the gradients of micro-batches
optim/             what moves the weights
operations.py      what the count of operations needs of a network; flops.py: the count
traffic.py         what a rank's collectives move
own_time.py        what a rank spends on its own work; profiling.py: chosen steps recorded
"""
