"""The tensors of two checkpoints, compared number by number. No rank and no network is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.weights import CheckpointWeights

_AT_ONCE = 4 << 20  # numbers: as doubles, three tensors of them take 100 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How a tensor differs between two checkpoints."""

    name: str
    most: float
    """The largest difference of a number; NaN if one of the two is not finite. 0 with other bits: -0 and 0."""
    equal: bool
    """Whether all bits are the same."""
    place: tuple[int, ...]
    """Where the largest difference is."""
    values: tuple[float, float]
    """The two numbers there."""
    moved: float
    """The largest way that a number has gone since an earlier checkpoint; without one, the largest number."""


def compare_tensors(
    first: CommittedCheckpoint, second: CommittedCheckpoint, before: CommittedCheckpoint | None
) -> Iterator[TensorDifference | str]:
    """Every tensor of both; a sentence for one that only one of them has, or that has another shape or type."""
    left, right = CheckpointWeights(first, ""), CheckpointWeights(second, "")
    start = None if before is None else CheckpointWeights(before, "")
    shapes, others = left.shapes(), right.shapes()
    for name in sorted(shapes.keys() | others.keys()):
        if name not in shapes or name not in others:
            yield f"{name} is only in {(first if name in shapes else second).path}"
        elif (shapes[name], left.dtypes()[name]) != (others[name], right.dtypes()[name]):
            yield (
                f"{name} is {list(shapes[name])} {left.dtypes()[name]} in {first.path}, "
                f"{list(others[name])} {right.dtypes()[name]} in {second.path}"
            )
        else:
            yield _compared(name, left, right, start if start is not None and name in start.shapes() else None)


def _compared(
    name: str, left: CheckpointWeights, right: CheckpointWeights, start: CheckpointWeights | None
) -> TensorDifference:
    shape = left.shapes()[name]
    rows = shape[0] if shape else 1
    step = max(1, _AT_ONCE // max(1, math.prod(shape[1:])))
    most, place, values, equal, moved = 0.0, (0,) * len(shape), (0.0, 0.0), True, 0.0
    for first in range(0, rows, step):
        last = min(rows, first + step)
        mine, theirs = left.read(name, first, last), right.read(name, first, last)
        wide = mine.double()
        way = wide if start is None else wide - start.read(name, first, last).double()
        moved = max(moved, _largest(way.abs())[0])
        if torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
            continue
        found, at = _largest((wide - theirs.double()).abs())
        if equal or not (math.isnan(most) or found <= most):  # NaN is the largest of all, and stays it
            index = [int(each) for each in torch.unravel_index(torch.tensor(at), mine.shape)]
            values = float(wide[tuple(index)]), float(theirs[tuple(index)])
            place = (index[0] + first, *index[1:]) if shape else ()
            most = found
        equal = False
    return TensorDifference(name=name, most=most, equal=equal, place=place, values=values, moved=moved)


def _largest(values: torch.Tensor) -> tuple[float, int]:
    """The largest number and its place; a NaN is larger than all."""
    at = int(values.reshape(-1).argmax())
    return float(values.reshape(-1)[at]), at
