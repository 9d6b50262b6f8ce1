"""Give a sharded network on the meta device its memory and its weights; no rank ever holds more than its share.

`sharded`: every rank reads its own piece of every tensor. `rank0`: rank 0 reads one tensor at a time and scatters the
pieces. Both go through the same list of targets in the same order, so that ranks never disagree about the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.collectives import on_all_ranks, on_rank0
from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.model.network import init_buffers
from raytune_fsdp.model.pieces.pieces import Piece, local_piece, piece_of
from raytune_fsdp.model.precision.quantized import ends_of
from raytune_fsdp.model.weights.keys import owned_tensors
from raytune_fsdp.model.weights.source import Weights, all_finite

# Bytes copied at a time. Mapped files take no memory before they are copied; tensors of a checkpoint or of a conversion
# do.
_READ_BYTES = 4 << 20


FillMode = Literal["sharded", "rank0", "empty"]
"""Who reads: every rank its own piece, rank 0 for all, or nobody because a checkpoint is loaded next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tensor of the network, and the piece of it that each rank keeps."""

    name: str
    local: torch.Tensor
    shape: torch.Size
    """Shape of the whole tensor."""
    pieces: tuple[Piece, ...]
    """The piece of every rank."""

    def numbers(self, rank: int) -> int:
        """Return how many of the tensor's numbers a rank keeps."""
        piece = self.pieces[rank]
        columns = self.shape[1:].numel()
        if piece.columns is not None:
            columns = columns // self.shape[1] * (piece.columns[1] - piece.columns[0])
        return (piece.rows[1] - piece.rows[0]) * columns


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    weights: Weights | None,
    mode: FillMode,
    device: torch.device,
    *,
    shards_at: torch.device | None = None,
    before: Callable[[str], None] | None = None,
) -> None:
    """Allocate every shard on `device` and fill it; with mode `empty` a checkpoint fills it later. Collective.

    If `shards_at` is given, the shards of weights are put there, and only buffers on `device`. With `rank0` only rank 0
    needs `weights`. Every rank calls `before` with the name of each tensor, before its rows are read. Values that are
    not finite are refused, on every rank alike.
    """
    owned = list(owned_tensors(model))
    place = shards_at or device
    allocate(model, place)
    wrong: dict[str, str] = {}
    if mode == "rank0":
        wrong = _scatter(_targets(model), weights, place, before)
    elif mode == "sharded":
        assert weights is not None, "every rank reads in sharded mode"
        rank = dist.get_rank()
        for target in _targets(model):
            if before is not None:
                before(target.name)
            if problem := _read(target, weights, target.pieces[rank]):
                wrong[target.name] = problem
    if mode != "empty":
        on_all_ranks(lambda: _refuse(wrong, weights))
    init_buffers(model, device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    assert list(owned_tensors(model)) == owned, "filling must keep tied weights tied"


def _refuse(wrong: Mapping[str, str], weights: Weights | None) -> None:
    if wrong:
        assert weights is not None, "this rank has read them"
        name, problem = next(iter(wrong.items()))
        raise ModelError(
            f"{weights.where(name)} {problem}"
            + (f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else "")
            + ", so nothing can be learned from there: download the model again, or use another one"
        )


def _problem(rows: torch.Tensor, local: torch.Tensor) -> str | None:
    """Return why these rows cannot be the values of a tensor of the network, or None."""
    if rows.is_floating_point() != local.is_floating_point():
        return f"has the type {rows.dtype}, where the network has {local.dtype}"
    # Only quantized rows are integers.
    shown = ends_of(rows) if rows.dtype == torch.uint8 else rows
    return None if all_finite(shown) else "has values that are not finite (NaN or infinity)"


def _read(target: Target, weights: Weights, piece: Piece) -> str | None:
    """Read this piece; return what is wrong with it, or None."""
    local, (start, stop) = target.local, piece.rows
    if not local.ndim:
        value = weights.read(target.name, start, stop)
        local.copy_(value)
        return _problem(value, local)
    problem = None
    at_once = max(1, _READ_BYTES // max(1, local.itemsize * target.shape[1:].numel()))
    for first in range(start, stop, at_once):
        beat()
        last = min(stop, first + at_once)
        rows = piece.of(weights.read(target.name, first, last))
        assert rows.shape == local[first - start : last - start].shape, f"{target.name}: {tuple(rows.shape)} were read"
        local[first - start : last - start].copy_(rows)
        # Checked 4 MiB at a time, just after the copy, so that it reads the processor's cache and not memory: 0.1 s a
        # GB.
        problem = problem or _problem(rows, local)
    return problem


def allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Give every tensor memory, in place: by default `to_empty` makes new parameters, which unties tied weights."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _targets(model: PreTrainedModel) -> list[Target]:
    world = dist.get_world_size()
    return [_target(name, tensor.detach(), world) for name, tensor in owned_tensors(model).items()]


def _target(name: str, tensor: torch.Tensor, world: int) -> Target:
    pieces = tuple(piece_of(tensor, rank) for rank in range(world))
    target = Target(name=name, local=local_piece(tensor), shape=tensor.shape, pieces=pieces)
    mine = dist.get_rank()
    assert target.local.numel() == target.numbers(mine), f"{name}: {tuple(target.local.shape)} is not {pieces[mine]}"
    return target


def _scatter(
    targets: list[Target], weights: Weights | None, device: torch.device, before: Callable[[str], None] | None
) -> dict[str, str]:
    """Scatter each tensor that rank 0 reads: every rank gets its piece. Return, on rank 0, each bad tensor's problem.

    Pieces travel as bytes of the stored type. A piece that is shorter than the longest (the last rank's) is padded.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dtypes = _agree_on_dtypes(targets, weights)
    most = [
        dtype.itemsize * max(target.numbers(each) for each in range(world))
        for target, dtype in zip(targets, dtypes, strict=True)
    ]
    # One buffer for all tensors: the allocator would keep freed pieces of many sizes. With one buffer, ranks that keep
    # 893 MiB of weights peak at 963 MiB; the largest tensor has 125 (docs/results.md).
    buffer = torch.empty(max(most), dtype=torch.uint8, device=device)
    spare = torch.empty_like(buffer) if rank == 0 else None
    wrong: dict[str, str] = {}
    for target, dtype, nbytes in zip(targets, dtypes, most, strict=True):
        beat()
        received = buffer[:nbytes]
        pieces = None
        if before is not None:
            before(target.name)
        if rank == 0:
            assert weights is not None and spare is not None
            whole = weights.read(target.name, 0, max(piece.rows[1] for piece in target.pieces))
            if problem := _problem(whole, target.local):
                wrong[target.name] = problem
            pieces = _pieces(target, whole, nbytes, spare, device)
            del whole
        dist.scatter(received, pieces, src=0)
        mine = received[: target.numbers(rank) * dtype.itemsize].view(dtype)
        target.local.copy_(mine.view(target.local.shape))
        if device.type == "cuda":
            # Else ranks queue all tensors at once, and NCCL would end the run if rank 0 took `collective_minutes` to
            # read them all.
            torch.cuda.current_stream(device).synchronize()
    return wrong


def _pieces(
    target: Target, whole: torch.Tensor, size: int, spare: torch.Tensor, device: torch.device
) -> list[torch.Tensor]:
    """Return one tensor's bytes for every rank: views of the tensor, unless a piece is short and needs padding."""
    whole = whole.contiguous().to(device)
    made: dict[Piece, torch.Tensor] = {}  # replicas have the same piece
    used = 0
    for piece in target.pieces:
        if piece in made:
            continue
        numbers = piece.of(whole[piece.rows[0] : piece.rows[1]]) if whole.ndim else whole
        made[piece] = sent = numbers.reshape(-1).view(torch.uint8)
        if sent.numel() < size:  # usually only one piece is short, and fits into `spare`
            made[piece] = spare[used : used + size] if used + size <= spare.numel() else torch.empty_like(spare[:size])
            made[piece][: sent.numel()].copy_(sent)
            used += size
    return [made[piece] for piece in target.pieces]


def _agree_on_dtypes(targets: list[Target], weights: Weights | None) -> list[torch.dtype]:
    """Broadcast the stored types, which only rank 0 can see."""

    def read() -> list[torch.dtype]:
        assert weights is not None, "rank 0 reads in rank0 mode"
        return [weights.read(t.name, 0, 0).dtype for t in targets]

    return on_rank0(read, what="read the types of the weights")
