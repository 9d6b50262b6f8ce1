"""Muon: make the update of every hidden matrix orthogonal, as a whole.

On shards torch's Muon orthogonalises each rank's rows alone, which is off by 2e-3 after 5 steps. Here one rank, the
owner of a matrix, gathers it and sends its rows back. As many matrices are handled at once as there are ranks, each by
another owner; they are taken by size, so that owners finish together. Experts need no gathering: every rank has whole
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raytune_fsdp.config.sections.optimizers import MuonOptimizer
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.execution import BY_OPERATION, Execution
from raytune_fsdp.step.optim.groups import Group
from raytune_fsdp.step.optim.matrices import Parts
from raytune_fsdp.step.optim.pieces import Split, in_parts
from raytune_fsdp.step.optim.update import Optimizer, Trained, Updates, decayed, replace, update_dtype, write

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration. Muon's authors chose them to raise small singular values fastest, to between
0.7 and 1.2."""

_AT_ONCE = 1 << 26
"""Numbers of experts that are made orthogonal at once, where that is done."""


class Muon(Updates):
    """Muon for hidden matrices, and another optimizer for the rest."""

    def __init__(
        self,
        weights: Trained,
        parts: Mapping[str, Parts],
        rest: Optimizer | None,
        chosen: MuonOptimizer,
        execution: Execution = BY_OPERATION,
    ) -> None:
        super().__init__(weights, execution)
        self._parts = parts
        self._rest = rest
        self._chosen = chosen
        self._split = Split.of(next(iter(weights.named.values())))
        self._many = Many()

    def init_state(self) -> None:
        super().init_state()
        if self._rest is not None:
            self._rest.init_state()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        rest = {} if self._rest is None else self._rest.state_tensors()
        return {**super().state_tensors(), **rest}

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        super().step(lr_factor, found_inf)
        if self._rest is not None:
            self._rest.step(lr_factor, found_inf)

    def _moments(self, name: str, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(parameter)}

    def _take(self, lr_factor: float, skip: torch.Tensor) -> None:
        taken = dict(self._trained.taken())
        self._trained.count(list(taken), skip)
        flat = [name for name in taken if self._trained.named[name].ndim == 2]
        # Sorted by shapes of whole matrices, so that every rank has the same list.
        flat.sort(key=lambda name: (-self._cost(name), name))
        owners = self._split.shards * self._split.replicas
        for start in range(0, len(flat), owners):
            self._together(flat[start : start + owners], taken, lr_factor, skip)
        for name, group in taken.items():
            if name not in flat:
                self._experts(name, group, lr_factor, skip)

    def _cost(self, name: str) -> int:
        shape = self._trained.named[name].shape
        return shape.numel() * min(shape)

    def _together(
        self, names: Sequence[str], groups: Mapping[str, Group], lr_factor: float, skip: torch.Tensor
    ) -> None:
        """Update as many matrices as there are ranks: replica r makes the r-th share of them orthogonal."""
        split = self._split
        rows = {name: self._direction(name, skip) for name in names}
        shares = [names[i * split.shards : (i + 1) * split.shards] for i in range(split.replicas)]
        mine = shares[split.replica]
        if mine:
            whole = [self._trained.named[name].shape for name in mine]
            sent = [rows[name] for name in mine]
            made = orthogonal_together(
                sent, whole, [self._parts[name] for name in mine], self._chosen.iterations, split
            )
            rows.update(zip(mine, made, strict=True))
        for replica, share in enumerate(shares):
            if split.over_replicas is not None:
                for name in share:
                    dist.broadcast(rows[name], group=split.over_replicas, group_src=replica)
        for name in names:
            self._write(name, rows[name], groups[name], lr_factor, skip)

    def _experts(self, name: str, group: Group, lr_factor: float, skip: torch.Tensor) -> None:
        """Update this rank's experts. They are whole, since rows of three-dimensional weights are experts."""
        update, parts = self._direction(name, skip), self._parts[name]
        for some in torch.split(update, max(1, _AT_ONCE // max(1, update.shape[1:].numel()))):
            for same in zip(*(parts(expert) for expert in some), strict=True):
                made = self._many([_flat(piece) for piece in same], self._chosen.iterations)
                for piece, value in zip(same, made, strict=True):
                    piece.copy_(_sized(value).view(piece.shape))
        self._write(name, update, group, lr_factor, skip)

    def _direction(self, name: str, skip: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a matrix to make orthogonal, in the type and on the device for that."""
        parameter, momentum = self._trained.named[name], self._trained.state[name]["momentum"]
        assert parameter.grad is not None
        local, mesh = local_piece(parameter), self._split.mesh
        # With parallel.cpu_offload the shards are in the host's memory, and the ranks compute and communicate on GPUs.
        place = local.device.type if mesh is None else mesh.device_type
        # bf16 is enough for the iteration, since it only ends near 1, but CPUs are not faster in it.
        found = torch.empty_like(local, dtype=torch.bfloat16 if place == "cuda" else update_dtype(local))
        for rows in in_parts(parameter, at_once=self._execution.at_once):
            into, share = (rows.of(momentum), rows.of(found)), self._chosen.momentum
            self._execution(_mean, into, rows.of(parameter.grad), share, self._chosen.nesterov, skip)
        return found if place == found.device.type else found.to(place)

    def _write(self, name: str, update: torch.Tensor, group: Group, lr_factor: float, skip: torch.Tensor) -> None:
        parameter = self._trained.named[name]
        update = update.to(local_piece(parameter).device)
        step, lr = self._trained.state[name]["step"], self._trained.rate(group, lr_factor)
        numbers = [self._execution.number(value, step.device) for value in (lr, 1 - lr * group.weight_decay)]
        for rows in in_parts(parameter, at_once=self._execution.at_once):
            noise = self._trained.noise_of_weight(name, rows)
            self._execution(_move, rows.of(parameter), rows.of(update), numbers, noise, step, skip)


def _mean(
    into: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor, share: float, nesterov: bool, skip: torch.Tensor
) -> None:
    """Move the momentum by a gradient, and write what is to be made orthogonal."""
    old, found = into
    gradient = gradient.to(update_dtype(old))
    mean = old.to(gradient.dtype) * share + gradient * (1 - share)
    replace(old, mean, skip)
    found.copy_(gradient * (1 - share) + mean * share if nesterov else mean)


def _move(
    weight: torch.Tensor,
    update: torch.Tensor,
    numbers: Sequence[Any],
    noise: torch.Tensor | None,
    step: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    lr, remains = numbers
    write(weight, decayed(weight, remains) - update.to(update_dtype(weight)) * lr, noise, step, skip)


def orthogonal_together(
    rows: Sequence[torch.Tensor], shapes: Sequence[torch.Size], parts: Sequence[Parts], iterations: int, split: Split
) -> list[torch.Tensor]:
    """Make matrices orthogonal of which every rank has some rows; rank i of those that share them does the i-th.

    Every rank has one whole matrix in memory, and sends and receives each number once.
    """
    group, me = split.over_shards, split.shard
    if group is None:
        return [_orthogonal_parts(each, part, iterations) for each, part in zip(rows, parts, strict=True)]
    sent = [each.numel() for each in rows] + [0] * (split.shards - len(rows))
    received = [0] * split.shards
    if me < len(rows):
        height, width = shapes[me]
        borders = [split.rows_of(height, shard) for shard in range(split.shards)]
        received = [(stop - start) * width for start, stop in borders]
    out = torch.cat([each.reshape(-1) for each in rows])
    whole = out.new_empty(sum(received))
    dist.all_to_all_single(whole, out, received, sent, group=group)
    if me < len(rows):
        whole = _orthogonal_parts(whole.view(shapes[me]), parts[me], iterations).view(-1)
    dist.all_to_all_single(out, whole, sent, received, group=group)
    back = torch.split(out, sent)
    return [piece.view(each.shape) for piece, each in zip(back, rows, strict=False)]


def _orthogonal_parts(matrix: torch.Tensor, parts: Parts, iterations: int) -> torch.Tensor:
    """Make each matrix in it orthogonal, and as large as an update of AdamW: 0.2 in the root mean square."""
    made = torch.empty_like(matrix)
    for piece, place in zip(parts(matrix), parts(made), strict=True):
        place.copy_(_sized(orthogonal(_flat(piece), iterations)).view(piece.shape))
    return made


def _flat(piece: torch.Tensor) -> torch.Tensor:
    return piece.reshape(-1, piece.shape[-1])


def _sized(orthogonal: torch.Tensor) -> torch.Tensor:
    return orthogonal * (0.2 * math.sqrt(max(orthogonal.shape)))


class Many:
    """Makes matrices of one shape orthogonal: all at once, where that gives the bits of one after the other.

    That is tried once for each shape and number of matrices, and only on GPUs: they start kernels slowly.
    """

    kinds: tuple[str, ...] = ("cuda",)

    def __init__(self) -> None:
        self.alike: dict[tuple[Any, ...], bool] = {}

    def __call__(self, matrices: Sequence[torch.Tensor], iterations: int) -> Sequence[torch.Tensor]:
        first, count = matrices[0], len(matrices)
        if count > 1 and first.device.type in self.kinds:
            key = count, first.shape, first.dtype, iterations
            if key not in self.alike:
                # The host waits here, in the first step.
                drawn = torch.Generator(first.device).manual_seed(0)
                some = [torch.randn(first.shape, generator=drawn, device=first.device) for _ in matrices]
                some = [each.to(first.dtype) for each in some]
                pairs = zip(_at_once(some, iterations), some, strict=True)
                self.alike[key] = all(torch.equal(a, orthogonal(b, iterations)) for a, b in pairs)
            if self.alike[key]:
                return _at_once(matrices, iterations)
        return [orthogonal(each, iterations) for each in matrices]


def _at_once(matrices: Sequence[torch.Tensor], iterations: int) -> Sequence[torch.Tensor]:
    tall = matrices[0].shape[0] > matrices[0].shape[1]
    stack = torch.stack([_normed(each) for each in matrices])
    for _ in range(iterations):
        stack = _iterated(stack)
    return (stack.mT if tall else stack).unbind()


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Raise a matrix's singular values to about 1 by the Newton-Schulz iteration: products of matrices only."""
    tall, value = matrix.shape[0] > matrix.shape[1], _normed(matrix)
    for _ in range(iterations):
        value = _iterated(value)
    return value.mT if tall else value


def _normed(matrix: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = (matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix).contiguous()
    normed: torch.Tensor = value / value.norm().clamp(min=1e-7)
    return normed


def _iterated(value: torch.Tensor) -> torch.Tensor:
    a, b, c = _COEFFICIENTS
    square = value @ value.mT
    return value * a + (square * b + (square @ square) * c) @ value
