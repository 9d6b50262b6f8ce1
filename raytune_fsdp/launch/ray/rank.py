"""What Ray Train runs in the process of every rank."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import ray
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from raytune_fsdp.launch.ray.board import Board, BoardStream, Committed, Joined, Reached, Started, Stop

if TYPE_CHECKING:
    from ray import ObjectRef

    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.launch.shared_storage import Token
    from raytune_fsdp.run.prepare import Prepared
    from raytune_fsdp.types import Saved, StepBatches


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank gets from the driver."""

    config: FinetuneConfig
    prepared: ObjectRef
    board: Board
    device: Literal["cpu", "cuda"]
    token: Token
    """What the driver has written to the run's storage."""
    tty: bool
    """Whether the driver prints to a terminal."""


def train_rank(job: RankJob) -> None:
    """One rank of one attempt. Raises what stopped it; the controller decides what becomes of the run."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
    job.board.tell(Joined(rank, node, ray.get_runtime_context().get_node_id(), os.getpid()))

    def reached(phase: str) -> None:
        if rank == 0:
            job.board.tell(Reached(phase))

    reached("workers")

    # Only now: transformers takes seconds, and until then the driver would not know that there is a rank.
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    from raytune_fsdp.assemble import Host
    from raytune_fsdp.errors import Interrupted
    from raytune_fsdp.launch.shared_storage import check_shared
    from raytune_fsdp.launch.worker import work

    prepared: Prepared = ray.get(job.prepared)
    check_shared(prepared.plan.run_dir)
    prepared, attempt, key = _agree(job, prepared, rank)
    logs = prepared.plan.run_dir / "logs" / f"attempt-{attempt}"
    _log_to(logs / f"rank-{rank}.log")
    if rank == 0:
        job.board.tell(Started(attempt, str(logs)))
    reached("imports")
    if prepared.state.step >= prepared.plan.steps:
        return  # the last attempt had committed the last step
    device = _device(job, rank, node)
    reports = _Reports(prepared.plan.run_dir)

    def saved(checkpoint: Saved) -> None:
        reports.add(checkpoint)
        if rank == 0:
            job.board.tell(Committed(checkpoint.step))

    host = Host(
        attempt=attempt,
        batches=_batches(job, prepared, rank=rank, world=world, key=key, device=device, reached=reached),
        console=cast(TextIO, BoardStream(job.board, tty=job.tty)),
        saved=saved,
        reached=reached,
    )
    try:
        work(job.config, prepared, device, Stop(job.board) if rank == 0 else lambda: False, host)
    except Interrupted:
        reports.finish()
        raise
    reports.finish()


def _agree(job: RankJob, prepared: Prepared, rank: int) -> tuple[Prepared, int, str]:
    """Where this attempt starts, its number, and a key of its own: rank 0 looks, all others do as it says."""
    import torch.distributed as dist

    from raytune_fsdp.collectives import on_rank0
    from raytune_fsdp.launch.shared_storage import check_seen
    from raytune_fsdp.run.prepare import renewed, settled
    from raytune_fsdp.run.record import next_attempt

    def look() -> tuple[Any, ...]:
        check_seen(job.token)  # what the driver has found there must be what there is
        found = prepared if job.board.count_attempt() == 1 else renewed(job.config, prepared)
        standing = (found.resume, found.state, found.plan, found.windows_built, found.damaged)
        return (*standing, next_attempt(found.plan), uuid.uuid4().hex)

    resume, state, plan, windows_built, damaged, attempt, key = on_rank0(look)
    assert plan.layout.world == dist.get_world_size(), (plan.layout, dist.get_world_size())
    prepared = replace(prepared, resume=resume, state=state, plan=plan, windows_built=windows_built, damaged=damaged)
    return settled(job.config, prepared), attempt, key


def _batches(
    job: RankJob, prepared: Prepared, *, rank: int, world: int, key: str, device: Any, reached: Callable[[str], None]
) -> Iterator[StepBatches]:
    """This rank's batches through Ray Data. Rank 0 opens the stream, so that only it decides where that begins.

    The first batch is made while the model is loaded.
    """
    from raytune_fsdp.assemble import division_of
    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.launch.ray.batches import ray_batches
    from raytune_fsdp.launch.ray.stream import split, stream_dataset

    division = division_of(prepared)
    if rank == 0:
        dataset = stream_dataset(
            Stream(prepared.train, seed=job.config.run.seed),
            prepared.state.cursor,
            micro_batch=division.micro_batch,
            samples=division.samples(),
            first_block=division.first_block(division.first_step),
        )
        job.board.share(key, split(dataset, world))
    shard = job.board.shared(key)[rank]
    batches = ray_batches(shard, prepared.train, division, rank=rank, device=device)
    threads = ThreadPoolExecutor(1, thread_name_prefix="first-batch")
    first = threads.submit(next, batches)
    first.add_done_callback(lambda _: reached("data"))
    threads.shutdown(wait=False)

    def told() -> Iterator[StepBatches]:
        if job.config.eval.at_start and not prepared.state.step:
            reached("evaluation")  # it comes before the first batch is asked for
        yield first.result()
        reached("step")

    return chain(told(), batches)


def _device(job: RankJob, rank: int, node: str) -> Any:
    import torch
    from ray.train.torch import get_device

    from raytune_fsdp.errors import ConfigError

    if job.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"rank {rank} on {node} has a GPU of Ray's, but its torch {torch.__version__} cannot use CUDA: install the "
            "CUDA build and the driver on all nodes, or set cluster.device=cpu"
        )
    device = get_device()
    torch.cuda.set_device(device)
    return device


class _Reports:
    """Tells Ray Train of checkpoints, in their order. That waits for all ranks and the controller, training not."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="report")

    def add(self, saved: Saved) -> None:
        self._threads.submit(self._tell, saved)

    def finish(self) -> None:
        """Wait until it knows all. Not after a failure: other ranks might never report."""
        self._threads.shutdown()

    def _tell(self, saved: Saved) -> None:
        try:
            _report(saved, self._run_dir)
        except Exception:  # its list is a hint, and is repaired where it has to be
            logger.warning("Ray Train was not told of the checkpoint of step %d", saved.step, exc_info=True)


def _report(saved: Saved, run_dir: Path) -> None:
    """Tell Ray Train of a checkpoint that lies where it belongs. All ranks: Ray Train waits for each."""
    context = ray.train.get_context()
    if not saved.path.startswith(f"{run_dir}/"):  # Ray Train looks for it there
        return
    filesystem = context.get_storage().storage_filesystem
    checkpoint = Checkpoint(saved.path, filesystem=filesystem) if context.get_world_rank() == 0 else None
    ray.train.report({"step": saved.step}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def _log_to(path: Path) -> None:
    """All that this process prints goes to the run directory, whatever writes it: also a library in C, and a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(file=2)
