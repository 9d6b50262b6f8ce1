"""Sum a step in the order of its micro-batches, with the same bits at any number of ranks: `run.exact`.

A sum of floats depends on its order. Here a gradient is ((b0 + b1) + b2) + … over the micro-batches of a step, in the
type of the weights, as one rank alone adds it. So each rank sends the gradients of its micro-batch as they are, in the
type that they were computed in; whoever has the rows adds them one after the other. A filler is left out, not added:
zeros would turn -0 into 0, and a filler that overflows would spoil a step at those numbers of ranks that have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raytune_fsdp.base.batch import MicroBatch
from raytune_fsdp.model.pieces.pieces import local_piece, piece_of
from raytune_fsdp.plan.division import Division
from raytune_fsdp.step.optim.pieces import at
from raytune_fsdp.step.relay import Levels, add_in_turns
from raytune_fsdp.step.sums import Totals
from raytune_fsdp.step.units import groups_of_unit

_WIDTH = 4096
"""Numbers of a row whose squares are summed at once: a row of experts, an expert, has millions."""
_AT_ONCE = {"cpu": 1 << 16}
"""Numbers whose squares are summed by one call, by the type of device: what stays in a CPU's cache."""
_ON_GPU = 1 << 20
"""A GPU's rows are padded to one number of them, so to far more than a rank of many has where this is large."""
_NOT_ALIKE = (
    "run.exact=true: some weights of a layer got a gradient from one micro-batch and none from another, so that their "
    "sums cannot be told apart; set run.exact=false"
)


class SumsInOrder:
    """Sums over the micro-batches of a step, one after the other, whoever has computed them."""

    def __init__(self, model: nn.Module, division: Division, levels: Levels | None = None) -> None:
        """Have the gradients of this network, which is sharded if it is to be, summed in order.

        `levels`: the ranks are on several nodes, and pass the sum from node to node.
        """
        self._division = division
        self._step = 0
        self._owners: list[int] = []
        """Of the micro-batches that are computed now, in their order, the ranks that compute them."""
        self._units: list[_InOrder] = []
        for module in model.modules():
            if division.data_ranks > 1 and isinstance(module, FSDPModule):
                (group,) = groups_of_unit(module) or (None,)
                if group is not None:
                    self._units.append(_InOrder(group, self._owners, levels))
                    cast(FSDPModule, module).set_custom_reduce_scatter(self._units[-1])  # type: ignore[arg-type]

    def start(self, step: int, like: torch.Tensor) -> None:
        self._step = step
        for unit in self._units:
            unit.summed = None
        self._rows = like.new_zeros(len(self._division.micro_batch_sizes(step)), 1, dtype=torch.float64)
        self._load = like.new_zeros((), dtype=torch.float64)

    def next_round(self, number: int) -> None:
        ranks, every = self._division.data_ranks, len(self._rows)
        self._owners[:] = [
            self._division.owner(self._step, index) for index in range(number * ranks, min(every, (number + 1) * ranks))
        ]

    def add(self, batch: MicroBatch, values: torch.Tensor, load: torch.Tensor) -> None:
        if self._rows.shape[1] != len(values):
            self._rows = self._rows.new_zeros(len(self._rows), len(values))
        if not batch.is_filler:
            self._rows[batch.index] = values
        self._load = self._load + load  # whole numbers: any order is right

    def over_ranks(self, trained: Sequence[nn.Parameter], gradients: list[torch.Tensor]) -> Totals:
        for unit in self._units:
            unit.check()
        rows, width = self._rows.shape
        squares, sizes = _squares_by_row(trained, gradients)
        # Each number is one rank's and zero on all others, so that no order can change it.
        sent = torch.cat([self._rows.flatten(), at(self._rows.device, squares), self._load])
        dist.all_reduce(sent)
        each, squares, load = torch.split(sent, [rows * width, len(squares), len(self._load)])
        total = _added(each.view(rows, width))
        norm = torch.stack([part.sum() for part in torch.split(squares, sizes)]).sum()
        return Totals(total[0], norm, torch.cat([total[1:], load]))


def sum_in_order(each: Mapping[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of vectors by their numbers, of which each rank has some. Collective. `like`: such a vector."""
    count = torch.full((), max(each, default=-1) + 1, dtype=torch.int64, device=like.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    rows = like.new_zeros(int(count), len(like))
    for number, values in each.items():
        rows[number] = values
    return add_in_order(rows)


def add_in_order(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of all rows, each of which is one rank's and zero on all others. Collective."""
    dist.all_reduce(rows)
    return _added(rows)


def _added(rows: torch.Tensor) -> torch.Tensor:
    """Add rows one after the other: a sum over an axis has another order on every device."""
    total = rows.new_zeros(rows.shape[1])
    for values in rows:
        total = total + values
    return total


def _squares_by_row(trained: Sequence[nn.Parameter], gradients: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return the sums of squares of all rows of all gradients, zero for rows of other ranks; and how many each has."""
    sizes = []
    found: list[torch.Tensor] = []
    for parameter, gradient in zip(trained, gradients, strict=True):
        rows = parameter.shape[0] if parameter.ndim else 1
        start, stop = piece_of(parameter).rows
        columns = parameter.numel() // max(1, rows)
        parts = -(-columns // _WIDTH)
        sums = gradient.new_zeros(rows * parts, dtype=torch.float64)
        sums[start * parts : stop * parts] = _row_sums(gradient.reshape(stop - start, columns), parts, rows * parts)
        found.append(sums)
        sizes.append(len(sums))
    return torch.cat(found), sizes


def _row_sums(rows: torch.Tensor, parts: int, every: int) -> torch.Tensor:
    """Return the sum of squares of each part of each row, in calls of one shape. `every`: the parts of all ranks' rows.

    How a GPU adds depends on the number of rows that it is given, and how many a rank has depends on the world.
    """
    if rows.shape[1] == 1:
        return rows.flatten().double().square()
    if parts > 1:
        rows = nn.functional.pad(rows, (0, parts * _WIDTH - rows.shape[1])).reshape(-1, _WIDTH)
    many = max(1, min(every, _AT_ONCE.get(rows.device.type, _ON_GPU) // max(1, rows.shape[1])))
    found = [rows.new_zeros(0, dtype=torch.float64)]
    for some in torch.split(rows, many):
        wide = some.to(torch.float64, copy=True)  # of fp64 `double` returns the gradients themselves
        if rows.device.type != "cpu":  # a CPU adds each row by itself
            wide = nn.functional.pad(wide, (0, 0, 0, many - len(wide)))
        found.append(wide.square_().sum(1)[: len(some)])
    return torch.cat(found)


class _InOrder:
    """Brings every rank its rows of the gradients of all ranks, and adds them to those of earlier micro-batches."""

    def __init__(self, group: Any, owners: Sequence[int], levels: Levels | None) -> None:
        self._group = group
        self._owners = owners
        self._levels = levels
        self._sends = False
        """Whether the buffer that FSDP asked for last is the one that is sent."""
        self.summed: list[Any] | None = None
        """The weights that had a sum when the last micro-batch was added to it; None: it is the step's first."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make FSDP's buffers: what is sent in the gradients' type, then what is kept in that of the weights."""
        kept = self._sends
        self._sends = not kept
        # The type of trained weights. A unit's first weight may be frozen, in 16 bits, or be bytes (QLoRA).
        return torch.empty(*size, dtype=self._group._orig_dtype if kept else dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        if self._levels is not None:
            begun = self._take(output_tensor)
            add_in_turns(output_tensor, input_tensor, self._owners, self._levels, begun=begun)
            return
        got = torch.empty_like(input_tensor)
        dist.all_to_all_single(got, input_tensor, group=group)
        parts = got.view(group.size(), -1)
        first, *others = self._owners
        if self._take(output_tensor):
            output_tensor.add_(parts[first])
        else:
            output_tensor.copy_(parts[first])
        for owner in others:
            output_tensor.add_(parts[owner])

    def _with_sums(self) -> list[Any]:
        return [each for each in self._group.fsdp_params if each.sharded_param.grad is not None]

    def check(self) -> None:
        """Refuse sums of weights of which not every micro-batch gives all a gradient.

        FSDP does not say whose gradients it sends: those of equal sizes would be added to each other.
        """
        if self.summed is not None and self._with_sums() != self.summed:
            raise RuntimeError(_NOT_ALIKE)

    def _take(self, output: torch.Tensor) -> bool:
        """Move the sum of earlier micro-batches to `output`, which then replaces it; return whether there is one."""
        kept = self._with_sums()
        if not kept:
            self.summed = None
            return False
        self.check()
        self.summed = kept
        sizes = [each.padded_sharded_param_size.numel() for each in kept]
        if sum(sizes) != output.numel():
            raise RuntimeError(_NOT_ALIKE)
        output.zero_()
        for each, place in zip(kept, torch.split(output, sizes), strict=True):
            rows = local_piece(each.sharded_param.grad).reshape(-1)
            place[: len(rows)].copy_(rows)
            each.sharded_param.grad = None
        return True
