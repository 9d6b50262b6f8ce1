"""The tensors of a run's state, and their way to and from storage as sharded files (torch.distributed.checkpoint).

Names are flat: `model.<name>` and `optim.<parameter>.<moment>`. Every rank writes its own shards; on loading, each rank
reads what it needs at whatever world size it is now.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from raytune_fsdp.errors import ResumeError, TransientError
from raytune_fsdp.model.keys import owned_tensors


def tensors_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor a checkpoint holds, as this rank has it. The optimizer must have its state already."""
    state = {f"model.{name}": tensor.detach() for name, tensor in owned_tensors(model).items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optim.{name}.{key}"] = value
    return state


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state its first step would: zero moments, to load into or to save before any step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def all_finite(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether no rank holds an infinity or a NaN. Collective, waits for the device."""
    bad = None
    for tensor in tensors.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            found = (~torch.isfinite(local)).any()
            bad = found if bad is None else bad | found
    flag = torch.zeros((), dtype=torch.int32) if bad is None else bad.to(torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return not bool(flag.item())


def write(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Write this rank's shards. Collective; `directory` must be fresh.

    One thread: with more, an error in a helper thread is swallowed and an incomplete checkpoint published.
    """
    writer = FileSystemWriter(directory, thread_count=1, overwrite=False, sync_files=True)
    try:
        save(tensors, storage_writer=writer)
    except CheckpointException as error:  # a BaseException: nothing else would catch it
        raise TransientError(f"checkpoint {directory} could not be written: {_reason(error)}") from error


def read(tensors: dict[str, torch.Tensor], directory: Path, *, alone: bool = False, whole: bool = True) -> None:
    """Fill `tensors` in place. Collective, unless `alone`. Nothing is cast or missed silently, or left if `whole`."""
    reader = FileSystemReader(directory)
    _compare(tensors, reader.read_metadata(), directory, whole=whole)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what `alone` means
            load(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        raise ResumeError(f"checkpoint {directory} could not be read: {_reason(error)}") from error


def stored_shapes(directory: Path, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of the stored tensors whose names start with `prefix`, without it."""
    entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        name.removeprefix(prefix): (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _compare(tensors: dict[str, torch.Tensor], metadata: Metadata, directory: Path, *, whole: bool) -> None:
    entries = metadata.state_dict_metadata
    problems = [f"{name} is missing" for name in tensors if name not in entries]
    if whole:
        problems += [f"{name} is not part of this model" for name in entries if name not in tensors]
    for name, tensor in tensors.items():
        entry = entries.get(name)
        if isinstance(entry, TensorStorageMetadata) and (entry.size, entry.properties.dtype) != (
            tensor.shape,
            tensor.dtype,
        ):
            problems.append(
                f"{name} is {list(entry.size)} {entry.properties.dtype} there, {list(tensor.shape)} {tensor.dtype} here"
            )
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ResumeError(f"checkpoint {directory} does not fit this model and optimizer: {problems[0]}{more}")


def _reason(error: CheckpointException) -> str:
    """The first rank's failure; the exception itself prints the stack of every rank."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
