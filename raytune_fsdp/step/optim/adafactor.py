"""Adafactor: keep only the means of rows and of columns of the squares of a matrix's gradients.

torch's Adafactor crashes on sharded tensors. Here a rank has the row means of its own rows, and all ranks have the
column means over all rows: these are summed over the ranks in fp64, in one vector for all matrices of the model, and so
are the sizes of the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raytune_fsdp.config.sections.optimizers import AdafactorOptimizer
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.execution import BY_OPERATION, Execution
from raytune_fsdp.step.optim.pieces import Rows, Split, at, in_parts, rows_at_once, split_like
from raytune_fsdp.step.optim.update import Trained, Updates, decayed, replace, update_dtype, write

_LEAST = 1e-30
"""Added to squares, so that a row whose gradients are all 0 is not divided by 0."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a weight, its gradient, and the factors of their second moment."""

    rows: Rows
    weight: torch.Tensor
    gradient: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    def scaled(self) -> torch.Tensor:
        """Return the gradient divided by the root of its second moment."""
        return _scaled(self.gradient, self.factors)


class Adafactor(Updates):
    """Adafactor without relative steps, first moments and scaling by the weight's size: the schedule's rate is used."""

    def __init__(
        self,
        weights: Trained,
        chosen: AdafactorOptimizer,
        execution: Execution = BY_OPERATION,
        *,
        exact: bool = False,
    ) -> None:
        """Sum squares over rows with `exact` so that no number of ranks changes a bit."""
        super().__init__(weights, execution)
        self._chosen = chosen
        self._exact = exact

    def _moments(self, name: str, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        local = local_piece(parameter)
        dtype = update_dtype(local)
        if parameter.ndim < 2:
            return {"square": torch.zeros_like(parameter, dtype=dtype)}
        row = split_like(parameter, *parameter.shape[1:-1], dtype=dtype)
        if parameter.ndim == 2:
            return {"row": row, "column": torch.zeros(parameter.shape[1], dtype=dtype, device=local.device)}
        # Stacked matrices: experts, of which a rank has whole ones.
        column = split_like(parameter, *parameter.shape[1:-2], parameter.shape[-1], dtype=dtype)
        return {"row": row, "column": column}

    def _take(self, lr_factor: float, skip: torch.Tensor) -> None:
        taken = self._trained.taken()
        names = [name for name, _ in taken]
        steps = self._trained.count(names, skip)
        self._factors(names, steps, skip)
        for (name, group), step, size in zip(taken, steps, self._sizes(names), strict=True):
            lr = self._trained.rate(group, lr_factor)
            numbers = [self._execution.number(value, step.device) for value in (lr, 1 - lr * group.weight_decay)]
            clip = (size / self._chosen.clip).clamp(min=1.0)
            for part in self._parts(name):
                noise = self._trained.noise_of_weight(name, part.rows)
                self._execution(
                    _move_weight, part.weight, part.gradient, part.factors, clip, numbers, noise, step, skip
                )

    def _factors(self, names: Sequence[str], steps: Sequence[torch.Tensor], skip: torch.Tensor) -> None:
        """Update the factors with the gradients of this step."""
        matrices = [name for name in names if self._trained.named[name].ndim == 2]
        if self._exact:
            sums = self._exactly(
                lambda name: (rows.double().square() for rows in self._gradients(name)),
                {name: self._trained.named[name].shape for name in matrices},
            )
        else:
            sums = self._summed([self._column_sums(name) for name in matrices])
        columns = dict(zip(matrices, sums, strict=True))
        for name, step in zip(names, steps, strict=True):
            parameter, state = self._trained.named[name], self._trained.state[name]
            assert parameter.grad is not None
            # In a weight's first update the old factors, which are 0, have no share.
            share = step.double() ** -self._chosen.decay_power
            if parameter.ndim == 2:
                _move(state["column"], columns[name] / parameter.shape[0] + _LEAST, share, skip)
            height = self._height(name)
            for rows in in_parts(parameter, whole_rows=True):
                if parameter.ndim < 2:
                    _move(rows.of(state["square"]), _squares(rows.of(parameter.grad)), share, skip)
                    continue
                squares = _squares(local_piece(parameter.grad)[rows.start : rows.stop])
                _move(local_piece(state["row"])[rows.start : rows.stop], _means(squares, -1, height), share, skip)
                if parameter.ndim > 2:
                    now = _means(squares, -2, height)
                    _move(local_piece(state["column"])[rows.start : rows.stop], now, share, skip)

    def _height(self, name: str) -> int:
        """Return how many rows of a weight are given to a call that computes their means; 0: those that there are."""
        parameter = self._trained.named[name]
        return min(rows_at_once(parameter), parameter.shape[0]) if self._exact and parameter.ndim > 1 else 0

    def _column_sums(self, name: str) -> torch.Tensor:
        parameter = self._trained.named[name]
        total = torch.zeros(parameter.shape[1], dtype=torch.float64, device=parameter.device)
        for rows in self._gradients(name):
            total += rows.double().square().sum(0)
        return total

    def _gradients(self, name: str) -> Iterator[torch.Tensor]:
        """Yield this rank's rows of a gradient, some at a time."""
        parameter = self._trained.named[name]
        assert parameter.grad is not None
        for rows in in_parts(parameter, whole_rows=True):
            yield rows.of(parameter.grad)

    def _sizes(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the root mean square of every update, before it is clipped."""
        many = [self._trained.named[name].numel() for name in names]
        if self._exact:
            summed = self._exactly(
                lambda name: (part.scaled().double().square().view(-1, 1) for part in self._parts(name)),
                {name: torch.Size([count, 1]) for name, count in zip(names, many, strict=True)},
            )
            return [(total[0] / count).sqrt() for total, count in zip(summed, many, strict=True)]
        squares = []
        for name in names:
            total = torch.zeros((), dtype=torch.float64, device=self._trained.named[name].device)
            for part in self._parts(name):
                total += part.scaled().double().square().sum()
            squares.append(total)
        return [(total / count).sqrt() for total, count in zip(self._summed(squares), many, strict=True)]

    def _parts(self, name: str) -> Iterator[_Part]:
        parameter, state = self._trained.named[name], self._trained.state[name]
        assert parameter.grad is not None
        for rows in in_parts(parameter, whole_rows=True):
            place = slice(rows.start, rows.stop)
            weight, gradient = rows.of(parameter), rows.of(parameter.grad)
            if parameter.ndim < 2:
                yield _Part(rows, weight, gradient, (rows.of(state["square"]),))
                continue
            # The mean of all rows' means is that of the columns', which every rank has.
            column = local_piece(state["column"])
            column = column if parameter.ndim == 2 else column[place]
            mean = column.mean(-1) if parameter.ndim == 2 else _means(column, -1, self._height(name))
            rest = column / mean.unsqueeze(-1)
            yield _Part(rows, weight, gradient, (local_piece(state["row"])[place].unsqueeze(-1), rest.unsqueeze(-2)))

    def _exactly(
        self, squares: Callable[[str], Iterator[torch.Tensor]], shapes: Mapping[str, torch.Size]
    ) -> list[torch.Tensor]:
        """Sum squares over all rows, as whole numbers: no order of adding changes these.

        `squares` yields this rank's rows of a tensor that is as large as `shapes` says.
        """
        largest = []
        for name, shape in shapes.items():
            most = torch.zeros(shape[1:], dtype=torch.float64, device=self._trained.named[name].device)
            for rows in squares(name):
                most = torch.maximum(most, rows.amax(0)) if len(rows) else most
            largest.append(most)
        scales = [
            # The sum of all rows has fewer than 62 bits. Of the smallest squares of fp64, 2**-1074, some are left out.
            torch.ldexp(torch.ones_like(most), 61 - shape[0].bit_length() - torch.frexp(most).exponent.clamp(min=-900))
            for most, shape in zip(self._summed(largest, op=dist.ReduceOp.MAX), shapes.values(), strict=True)
        ]
        totals = []
        for name, scale in zip(shapes, scales, strict=True):
            total = torch.zeros(scale.shape, dtype=torch.int64, device=scale.device)
            for rows in squares(name):
                total += (rows * scale).round().to(torch.int64).sum(0)
            totals.append(total)
        return [total.double() / scale for total, scale in zip(self._summed(totals), scales, strict=True)]

    def _summed(self, values: Sequence[torch.Tensor], op: Any = dist.ReduceOp.SUM) -> list[torch.Tensor]:
        """Sum over the ranks that share the weights' rows, with one collective."""
        if not values:
            return []
        split = Split.of(next(iter(self._trained.named.values())))
        flat = torch.cat([value.reshape(-1) for value in values])
        if split.over_shards is not None:
            assert split.mesh is not None
            there = flat.to(split.mesh.device_type)
            dist.all_reduce(there, op=op, group=split.over_shards)
            if split.over_replicas is not None:
                # NCCL adds in an order of each group's own, and replicas whose last bits differ would stay apart.
                dist.broadcast(there, group=split.over_replicas, group_src=0)
            flat = at(flat.device, there)
        found = torch.split(flat, [value.numel() for value in values])
        return [each.view(value.shape) for each, value in zip(found, values, strict=True)]


def _scaled(gradient: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    root = factors[0].sqrt()
    if len(factors) == 2:
        root = root * factors[1].sqrt()
    return gradient.to(update_dtype(gradient)) / root.reshape(gradient.shape)


def _move_weight(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    factors: Sequence[torch.Tensor],
    clip: torch.Tensor,
    numbers: Sequence[Any],
    noise: torch.Tensor | None,
    step: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    lr, remains = numbers
    update = _scaled(gradient, factors)
    write(weight, decayed(weight, remains) - update / clip.to(update.dtype) * lr, noise, step, skip)


def _squares(gradient: torch.Tensor) -> torch.Tensor:
    wide = gradient.to(update_dtype(gradient))
    return wide * wide + _LEAST


def _means(rows: torch.Tensor, axis: int, height: int) -> torch.Tensor:
    """Return the means of each of these rows along an axis, computed in a call of `height` rows or more.

    How a GPU adds depends on how many rows it is given, and a CPU's threads share a single wide one; how many rows a
    rank has depends on the number of ranks.
    """
    more = height - len(rows)
    whole = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, more)) if more > 0 else rows
    return whole.mean(axis)[: len(rows)]


def _move(factor: torch.Tensor, now: torch.Tensor, share: torch.Tensor, skip: torch.Tensor) -> None:
    replace(factor, factor * (1 - share).to(factor.dtype) + now.to(factor.dtype) * share.to(factor.dtype), skip)
