"""What one rank does, whoever has started it: join the process group, build the parts, train, say how it ended."""

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

from raytune_fsdp.assemble import Host, assemble
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import DataError, Interrupted, TrainingError
from raytune_fsdp.launch.torchrun import local_rank
from raytune_fsdp.loop import train
from raytune_fsdp.run.standing import Prepared, Standing
from raytune_fsdp.tracking.tracker import Status
from raytune_fsdp.types import Stop, StopReason

COLLECTIVE_MINUTES = 30
"""A rank that waits longer than this for the others gives up."""


class StopFlag:
    """Set by SIGTERM or SIGINT; training looks at it once a step and ends with a checkpoint."""

    def __init__(self, *, insist: bool = True) -> None:
        """With `insist`, a second signal of the same kind ends the process as if nobody had listened."""
        self._reason: StopReason | None = None
        self._insist = insist

    def __call__(self) -> StopReason | None:
        return self._reason

    def install(self) -> None:
        """Take over both signals."""
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._receive)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over both signals for a while; for a process that goes on afterwards."""
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
    """This rank's device, by `cluster.device`."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus < workers_here):
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def join(device: torch.device, *, alone: bool) -> None:
    """Make the process group: alone, or with the ranks that the environment names."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=COLLECTIVE_MINUTES)
    if alone:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def work(
    config: FinetuneConfig,
    prepared: Prepared,
    standing: Standing,
    device: torch.device,
    stop: Stop,
    host: Host | None = None,
) -> int:
    """Train on this rank; the process group exists. Returns the last step."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    parts = assemble(config, prepared, standing, device, host)
    status: Status = "failed"
    try:
        state = train(parts, stop)
        status = "finished"
    except Interrupted:
        status = "interrupted"
        raise
    except DataError as error:  # a row that was not read before: training has started, so it is no longer a refusal
        raise TrainingError(
            f"{error}. With data.bad_rows=skip the run goes on from its last checkpoint; corrected data would make it "
            "another run, so give that another run.name"
        ) from error
    finally:
        parts.saves.leave()
        parts.tracker.finish(status)
    return state.step
