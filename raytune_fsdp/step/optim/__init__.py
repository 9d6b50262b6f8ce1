"""Optimizers over a sharded model, and the learning rate as a pure function of the step.

    interface.py    what training and checkpoints require         build.py        which optimizer a run has
    schedule.py     the learning rate                             groups.py       which weights are updated alike
    adamw.py        torch's fused kernel                          elementwise.py  AdamW written out, SGD, Lion
    muon.py         orthogonal updates, of the matrices that matrices.py finds
    adafactor.py    factored second moments                       update.py       what all but adamw.py share
    moments.py      moments in bf16 and in 8 bits                 noise.py        rounding by keyed noise
    pieces.py       a rank's pieces of sharded tensors

A new optimizer is a class with the three methods of `Optimizer`, or a `Rule` of elementwise.py; a section in
config/sections/optimizers.py; and a branch in `build_optimizer`. Whatever it computes from more than one number of a
weight must be computed from the whole weight, or the number of ranks would decide what is learned.
"""

from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.groups import Group, check_groups, undecayed_names
from raytune_fsdp.step.optim.interface import Optimizer
from raytune_fsdp.step.optim.matrices import check_matrices
from raytune_fsdp.step.optim.pieces import at, local_gradients
from raytune_fsdp.step.optim.schedule import lr_factor, multiplier

__all__ = [
    "Group",
    "Optimizer",
    "at",
    "build_optimizer",
    "check_groups",
    "check_matrices",
    "local_gradients",
    "local_piece",
    "lr_factor",
    "multiplier",
    "undecayed_names",
]
