"""Optimizers over a sharded model, and the learning rate as a pure function of the step.

    build.py        which optimizer a run has                     groups.py       which weights are updated alike
    schedule.py     the learning rate                             update.py       what training needs, and what all
                                                                                  optimizers share
    adamw.py        torch's fused kernel                          elementwise.py  rules: AdamW written out, SGD, Lion, …
    muon.py         orthogonal updates, of the matrices that matrices.py finds
    adafactor.py    factored second moments                       moments.py      moments in bf16 and in 8 bits
    pieces.py       a rank's pieces of sharded tensors            execution.py   a rule as one kernel, or as it is
                                                                                  written

A new optimizer is a section in config/sections/optimizers.py and a `Rule` of elementwise.py, named in its `RULES`; or,
if not every number is updated by itself, a class with the three methods of `Optimizer`, in a file of its own, and a
branch in `build_optimizer`. Whatever it computes from several numbers of a weight
must be computed from the whole weight, or the number of ranks would change what is learned.
"""
