"""What takes the memory of a device; where a GPU ran out of it, the cheapest change that helps."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from raytune_fsdp.base.errors import OccupiedError, TrainingError, first_line
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.update import Optimizer

logger = logging.getLogger(__name__)

_CONTEXT_BYTES = 4 << 30
"""More than a process has on a GPU besides tensors: CUDA's context and NCCL's buffers, 1 to 2 GiB."""
_MOSTLY = 0.8
"""If weights, gradients and moments take this share, activations cannot be what has to give way."""


def explain(
    error: torch.OutOfMemoryError,
    config: FinetuneConfig,
    parallel: ParallelConfig,
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    rank: int,
    directory: Path,
) -> TrainingError:
    """Return the error to raise instead, and write a snapshot of the allocator to `directory`.

    `parallel` is what the attempt uses, which may differ from the config's.
    """
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    used = consumers(model, optimizer, device, peak)
    largest = sorted(used.items(), key=lambda item: item[1], reverse=True)[:3]
    shown = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in largest)
    snapshot = _snapshot(device, directory / f"memory-rank-{rank}.pickle")
    return TrainingError(
        f"rank {rank} ran out of memory on {device}: {first_line(error).rstrip('.')}. Largest: {shown}. "
        f"Cheapest change: {cheapest_change(config, parallel, used)}{snapshot}"
    )


def explain_building(
    error: torch.OutOfMemoryError, config: FinetuneConfig, device: torch.device, *, rank: int
) -> TrainingError:
    """Return the error to raise instead where nothing is built yet whose bytes could be counted."""
    if device.type == "cuda" and (others := _held_by_others(device)):
        return OccupiedError(
            f"rank {rank} ran out of memory on {device} before the first step, where other processes hold "
            f"{others / 2**30:.1f} GiB: {first_line(error).rstrip('.')}. `nvidia-smi` on its node lists them; "
            "those of an attempt that has just ended will be gone in the next one"
        )
    return TrainingError(
        f"rank {rank} ran out of memory on {device} while it made weights and moments, before the first step: "
        f"{first_line(error).rstrip('.')}. Cheapest change: {_spread_states(config.parallel)}"
    )


def _held_by_others(device: torch.device) -> int:
    """Return the bytes of a GPU that other processes hold; 0 if it may be this one's context."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return others if others > _CONTEXT_BYTES else 0


def consumers(model: nn.Module, optimizer: Optimizer, device: torch.device, peak: int) -> dict[str, int]:
    """Return bytes on the device by what holds them; `peak` is the most that was allocated at a time."""
    parameters = list(model.parameters())
    held: dict[str, Iterable[torch.Tensor]] = {
        "weights": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "moments": optimizer.state_tensors().values(),
    }
    used = {
        name: sum(int(local_piece(each).nbytes) for each in tensors if each.device.type == device.type)
        for name, tensors in held.items()
    }
    return {**used, "activations and gathered weights": max(0, peak - sum(used.values()))}


def bytes_kept(model: nn.Module, optimizer: Optimizer, device: torch.device) -> int:
    """Return the bytes of this device that weights, buffers and optimizer state take; shared memory counts once."""
    tensors = [*model.parameters(), *model.buffers(), *optimizer.state_tensors().values()]
    storages = (local_piece(each).untyped_storage() for each in tensors if each.device.type == device.type)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def cheapest_change(config: FinetuneConfig, parallel: ParallelConfig, used: dict[str, int]) -> str:
    """Return what to change, the cheapest first. All changes but the last leave results as they are."""
    states = 1 - used["activations and gathered weights"] / max(1, sum(used.values()))
    if states > _MOSTLY:
        return _spread_states(parallel)
    if config.model.loss == "plain":
        return "model.loss=auto, which makes no logits of a whole micro-batch"
    if parallel.activation_checkpointing == "none":
        return "parallel.activation_checkpointing=selective"
    if parallel.activation_checkpointing != "full":
        return "parallel.activation_checkpointing=full"
    if not parallel.activation_offload:
        return "parallel.activation_offload=true"
    return "more ranks (cluster.workers) or, in a new run, a smaller train.micro_batch or data.seq_len"


def _spread_states(parallel: ParallelConfig) -> str:
    if parallel.strategy in ("replicate", "shard_grad_op", "hybrid_shard"):
        return "parallel.strategy=full_shard"
    return "more ranks (cluster.workers), which share weights, gradients and moments"


def _snapshot(device: torch.device, path: Path) -> str:
    """Write what the allocator holds, for pytorch.org/memory_viz. Return a sentence that says where."""
    if device.type != "cuda":
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        logger.warning("no snapshot of the memory: %s", error)
        return ""
    return f". Snapshot, for pytorch.org/memory_viz: {path}"
