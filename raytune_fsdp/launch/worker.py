"""What one rank does, whatever started it: join the process group, build the parts, train, say how it ended."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from raytune_fsdp.assemble import LauncherHooks, assemble
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import DataError, Interrupted, TrainingError
from raytune_fsdp.launch.torchrun import local_rank
from raytune_fsdp.loop import train
from raytune_fsdp.run.standing import Prepared, Standing
from raytune_fsdp.tracking.tracker import Status
from raytune_fsdp.types import Stop, StopReason

COLLECTIVE_MINUTES = 30
"""A rank that waits longer than this in a collective gives up. This catches ranks that hang: those that die are noticed
at once. The default of Ray Train and of torch with gloo; torch with NCCL would give up after 10."""


class StopFlag:
    """Set by SIGTERM or SIGINT. Training asks it once per step, and ends with a checkpoint."""

    def __init__(self, *, insist: bool = True) -> None:
        """With `insist`, a second signal of the same kind has its default effect, which ends the process."""
        self._reason: StopReason | None = None
        self._insist = insist

    def __call__(self) -> StopReason | None:
        return self._reason

    def install(self) -> None:
        """Handle both signals."""
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._receive)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals inside the block, for a process that goes on afterwards."""
        before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
        self.install()
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _receive(self, kind: int, frame: FrameType | None) -> None:
        self._reason = StopReason.SIGNAL
        if self._insist:
            signal.signal(kind, signal.SIG_DFL)


def choose_device(wanted: str, workers_here: int) -> torch.device:
    """This rank's device, following `cluster.device`."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus < workers_here):
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def join(device: torch.device, *, alone: bool) -> None:
    """Make the process group: alone, or with the ranks that the environment describes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo beside nccl, so that ranks can agree on host tensors without waiting for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=COLLECTIVE_MINUTES)
    if alone:
        # A store in memory: the default one would read addresses from the environment and open a port.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def work(
    config: FinetuneConfig,
    prepared: Prepared,
    standing: Standing,
    device: torch.device,
    stop: Stop,
    hooks: LauncherHooks | None = None,
) -> int:
    """Train on this rank, whose process group exists already. Returns the last step."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    parts = assemble(config, prepared, standing, device, hooks)
    status: Status = "failed"
    try:
        state = train(parts, stop)
        status = "finished"
    except Interrupted:
        status = "interrupted"
        raise
    except DataError as error:
        # A row that was not read before. Training has started, so this is no longer a refusal (exit code 2).
        raise TrainingError(
            f"{error}. With data.bad_rows=skip the run continues from its last checkpoint; corrected data would "
            "make it another run, so choose another run.name for that"
        ) from error
    finally:
        parts.saves.leave()
        parts.tracker.finish(status)
    return state.step
