"""Work as one rank, whatever started it: join the process group, build the run, train, report how it ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from raytune_fsdp.base.batch import Stop
from raytune_fsdp.base.errors import DamagedError, DataError, HandedOver, Interrupted, TrainingError
from raytune_fsdp.base.lease import Lease
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.quiet import log_warnings
from raytune_fsdp.launch.signals import SignalReceived
from raytune_fsdp.launch.torchrun import Meeting, local_rank
from raytune_fsdp.model.compile_layers import settings_restored
from raytune_fsdp.record.tracker import Status
from raytune_fsdp.run.assemble import LauncherHooks, assemble
from raytune_fsdp.run.loop import RankRun, train
from raytune_fsdp.run.measure.out_of_memory import explain, explain_building
from raytune_fsdp.run.measure.own_failure import put_failure
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.step.precision import numerics


def gpus_here() -> int:
    """Return how many GPUs of this machine torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(wanted: str, workers_here: int) -> torch.device:
    """Return this rank's device, following `cluster.device`."""
    if wanted == "cpu" or (wanted == "auto" and gpus_here() < workers_here):
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def join(
    device: torch.device, *, alone: bool, minutes: float = 30.0, subgroups: bool = False, at: Meeting | None = None
) -> None:
    """Make the process group: alone, with the ranks that the environment describes, or with those that have met.

    `minutes` is `cluster.collective_minutes`; with NCCL, torch's default is 10. `subgroups`: the ranks will be divided,
    as by `hybrid_shard`, `replicate`, `reduce: hierarchical` and `parallel.mesh`.
    """
    if device.type == "cuda":
        use_gpu(device)
    # gloo besides nccl, so that ranks can agree on host tensors without waiting for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=minutes)
    # Name the device, so that NCCL connects at once and to this one, instead of guessing one from the rank. Not if
    # groups are divided: torch would then split this one, which nobody has tried for gloo together with NCCL.
    bound = device if device.type == "cuda" and not subgroups else None
    # Alone, a store in memory: the default one would read addresses from the environment and open a port.
    store, rank, world = (HashStore(), 0, 1) if alone else (at.store, at.rank, at.world) if at else (None, -1, -1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Have a process group of this process alone while the context lasts."""
    join(device, alone=True)
    try:
        yield
    finally:
        dist.destroy_process_group()


def use_gpu(device: torch.device) -> None:
    """Make this the process's GPU."""
    # Micro-batches have documents of all lengths, whose tensors would leave holes in segments of fixed sizes.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_device(device)


def work(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    device: torch.device,
    stop: Stop,
    hooks: LauncherHooks | None = None,
    *,
    own_log: bool = False,
) -> int:
    """Train on this rank, whose process group exists already. Returns the last step.

    `own_log`: this rank prints into a file of its own.
    """
    log_warnings(for_all=own_log or dist.get_rank() == 0)
    with numerics(config.parallel, device, deterministic=config.run.repeats_bits), settings_restored():
        try:
            parts = assemble(config, prepared, standing, device, hooks)
        except torch.OutOfMemoryError as error:
            raise explain_building(error, config, device, rank=dist.get_rank()) from error
        try:
            return _work(parts, stop, prepared.lease, dry=prepared.dry)
        except TrainingError as error:
            put_failure(error, prepared.place, standing.attempt, prepared.lease)
            raise


def _work(parts: RankRun, stop: Stop, lease: Lease | None, *, dry: bool = False) -> int:
    status: Status = "failed"
    try:
        state = train(parts, stop)
        status = "finished"
    except torch.OutOfMemoryError as error:
        raise explain(
            error, parts.config, parts.parallel, parts.model, parts.optimizer, parts.device,
            rank=dist.get_rank(), directory=parts.profiler.directory,
        ) from error  # fmt: skip
    except HandedOver:
        status = "handed_over"
        raise
    except (Interrupted, SignalReceived):
        status = "failed" if dry else "interrupted"  # which the console prints as "the same command continues"
        raise
    except DamagedError as error:
        raise TrainingError(str(error)) from error
    except DataError as error:
        # About a row that was not read before. Training has started, so this is no longer a refusal (exit code 2).
        raise TrainingError(
            f"{error}. With data.bad_rows=skip the run continues from its last checkpoint; corrected data would "
            "make it another run, so choose another run.name for that"
        ) from error
    finally:
        parts.saves.leave()
        if lease is not None and lease.lost():
            status = "handed_over"  # another command has the run, and reports to MLflow how it ends
        parts.tracker.finish(status)
    return state.step
