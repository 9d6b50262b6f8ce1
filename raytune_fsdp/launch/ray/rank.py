"""One rank of one attempt, as Ray Train runs it in every worker."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import ray
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from raytune_fsdp.base.beat import pulse
from raytune_fsdp.base.errors import HandedOver, Interrupted
from raytune_fsdp.base.machine import began
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.launch.ray.board import (
    Board,
    BoardStream,
    Committed,
    Failed,
    Joined,
    PhaseFinished,
    Started,
    StopFromBoard,
)
from raytune_fsdp.launch.ray.keepers import peers_of_rank
from raytune_fsdp.launch.ray.rank_log import RankLog
from raytune_fsdp.launch.ray.watch.beats import Beats
from raytune_fsdp.launch.signals import answer_with_stacks
from raytune_fsdp.record.screen_messages import Looks

if TYPE_CHECKING:
    from ray import ObjectRef

    from raytune_fsdp.base.batch import StepBatches, Stop
    from raytune_fsdp.base.measured import NotPredicted, Predicted, Saved
    from raytune_fsdp.checkpoint.peers.storage import PeerStorage
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.launch.shared_storage import Token
    from raytune_fsdp.plan.run_dir import RunDir
    from raytune_fsdp.record.tracker import Tracker
    from raytune_fsdp.run.resume_point import ResumePoint, RunInputs


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """Everything that the driver gives to every rank."""

    config: FinetuneConfig
    prepared: ObjectRef
    """`RunInputs`, and the `ResumePoint` of the first attempt of this command. They are passed by reference, as
    reading them imports transformers."""
    first: bool
    """Whether this is the first attempt of this command; later ones look for themselves where the run is."""
    board: Board
    device: Literal["cpu", "cuda"]
    token: Token
    """The token that the driver left in the run's storage."""
    looks: Looks
    """How the driver's output looks."""
    verbose: bool
    """Whether libraries may print what they like."""
    in_ray_log: bool
    """Whether what the ranks print is also in Ray's logs of them."""
    forced: bool
    """Whether to start even what does not fit."""
    notices: Mapping[str, float]
    """How many seconds a run has left after each kind of notice that it will be ended."""
    predicted: Predicted | NotPredicted | None = None
    """The prediction of what a rank of this attempt needs."""


def train_rank(job: RankJob) -> None:
    """One rank of one attempt. Raises what stopped it; the driver decides whether the run goes on."""
    answer_with_stacks()
    context = ray.train.get_context()
    try:
        _train(job, context.get_world_rank(), context.get_world_size())
    except (HandedOver, Interrupted):
        raise
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        job.board.tell(Failed(context.get_world_rank(), pulse().step, f"{Path(place.filename).name}:{place.lineno}"))
        raise


def _train(job: RankJob, rank: int, world: int) -> None:
    node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
    context = ray.train.get_context()
    job.board.tell(
        Joined(
            rank=rank, node=node, node_id=ray.get_runtime_context().get_node_id(), pid=os.getpid(),
            node_rank=context.get_node_rank(), local_rank=context.get_local_rank(),
            actor=ray.get_runtime_context().current_actor, began=began(os.getpid()),
        )
    )  # fmt: skip
    beats = Beats(job.board, rank, world)
    beats.begin()

    def reached(phase: str) -> None:
        beats.reached(phase)
        if rank == 0:
            job.board.tell(PhaseFinished(phase))

    reached("workers")
    # After the notice: importing transformers takes seconds, and the driver should know that the rank is there.
    from raytune_fsdp.base.hushed import VERBOSE
    from raytune_fsdp.launch.quiet import quiet

    if job.verbose:
        os.environ[VERBOSE] = "1"  # a process of our own, which the driver's variables do not reach
    quiet()
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    from raytune_fsdp.launch.importing import importing
    from raytune_fsdp.launch.shared_storage import check_shared

    with importing(alone=True):
        import raytune_fsdp.launch.worker  # noqa: F401  (all that is imported further below)

        prepared, first = cast("tuple[RunInputs, ResumePoint]", ray.get(job.prepared))
    check_shared(prepared.place.path)
    copies = 0 if prepared.dry else job.config.checkpoint.peer_copies
    peers = peers_of_rank(job.board, copies) if copies else None
    standing = _agree(job, prepared, first, world, peers)
    if job.config.eval.at_start and standing.begins:
        beats.evaluates_first()
    log = RankLog(prepared.place.log(standing.attempt, rank), in_ray=job.in_ray_log)
    try:
        _work(job, prepared, standing, log, peers, rank=rank, world=world, node=node, reached=reached)
    finally:
        log.copy()


def _work(
    job: RankJob,
    prepared: RunInputs,
    standing: ResumePoint,
    log: RankLog,
    peers: PeerStorage | None,
    *,
    rank: int,
    world: int,
    node: str,
    reached: Callable[[str], None],
) -> None:
    from raytune_fsdp.launch.worker import work
    from raytune_fsdp.predict.preflight import check_memory
    from raytune_fsdp.run.assemble import LauncherHooks
    from raytune_fsdp.step.parallel import memory_of

    if rank == 0:
        job.board.tell(Started(standing.attempt, str(prepared.place.logs(standing.attempt)), standing.state.step))
    reached("imports")
    if standing.complete:
        return  # an earlier attempt committed the last step, and crashed afterwards
    device = _device(job, rank, node)
    if job.predicted is not None:  # again, by this rank's device: the driver may not know what devices there are
        here = ray.train.get_context().get_local_world_size()
        check_memory(
            job.config, prepared, standing.plan, job.predicted, kind=device.type, memory=memory_of(device),
            ranks=here if device.type == "cpu" else 1, forced=job.forced or not job.first, look=False,
        )  # fmt: skip
    # `ray.train.report` is a barrier of all ranks and the controller, which takes about a second: training does not
    # wait. One thread, so that checkpoints are reported in order.
    reports = ThreadPoolExecutor(1, thread_name_prefix="report")

    def saved(checkpoint: Saved) -> None:
        reports.submit(_report, prepared.place, checkpoint)
        if rank == 0:
            job.board.tell(Committed(checkpoint.step, checkpoint.lasting))

    hooks = LauncherHooks(
        batches=_batches(job, prepared, standing, rank=rank, reached=reached),
        console=cast(TextIO, BoardStream(job.board, job.looks)),
        trackers=[*_trackers(job.config, log)],
        saved=saved,
        reached=reached,
        predicted=_as_placed(job.predicted, world),
        notices=job.notices,
        peers=peers,
    )
    stop: Stop = StopFromBoard(job.board) if rank == 0 else lambda: None
    try:
        work(job.config, prepared, standing, device, stop, hooks, own_log=True)
    except (Interrupted, HandedOver):
        reports.shutdown()
        raise
    reports.shutdown()  # waits until all are reported. Not after a failure: other ranks might never report


def _trackers(config: FinetuneConfig, log: RankLog) -> Iterator[Tracker]:
    """Yield the trackers that only a rank on Ray has."""
    from raytune_fsdp.launch.ray.prometheus import PrometheusTracker
    from raytune_fsdp.record.console import ConsoleTracker

    if config.tracking.prometheus.enabled:
        yield PrometheusTracker(config.run.name)
    if log.in_ray is not None and config.tracking.console:
        yield ConsoleTracker(log.in_ray, every=config.tracking.console_every)


def _report(place: RunDir, saved: Saved) -> None:
    """Report a checkpoint to Ray Train."""
    if not saved.path.startswith(f"{place.path}/"):
        return  # elsewhere (checkpoint.storage): NO_UPLOAD accepts only paths in the run directory
    try:
        context = ray.train.get_context()
        filesystem = context.get_storage().storage_filesystem
        checkpoint = Checkpoint(saved.path, filesystem=filesystem) if context.get_world_rank() == 0 else None
        ray.train.report({"step": saved.step}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    except Exception:  # Ray's list is a hint, and repaired before every start
        logger.warning("the checkpoint of step %d was not reported to Ray Train", saved.step, exc_info=True)


def _agree(job: RankJob, prepared: RunInputs, first: ResumePoint, world: int, peers: PeerStorage | None) -> ResumePoint:
    """Agree where this attempt starts. Collective."""
    from raytune_fsdp.checkpoint.location import hold
    from raytune_fsdp.launch.shared_storage import check_seen
    from raytune_fsdp.run.peers.going_on import look_with_peers
    from raytune_fsdp.run.resume_point import agree, look, on_world

    if peers is not None:
        hold(peers)

    def begin() -> ResumePoint:
        check_seen(job.token)  # the driver checked its storage: it must be this one
        if job.first:
            return on_world(job.config, prepared, first, world)
        if peers is None:
            return look(job.config, prepared, world)
        return look_with_peers(job.config, prepared, world, peers)

    standing = agree(job.config, prepared, begin)
    assert standing.plan.layout.world == world, (standing.plan.layout, world)
    return standing


def _batches(
    job: RankJob,
    prepared: RunInputs,
    standing: ResumePoint,
    *,
    rank: int,
    reached: Callable[[str], None],
) -> Iterator[StepBatches | None]:
    """Return this rank's batches, through Ray Data. Rank 0 opens the stream: one process decides where it begins.

    The first batch is made while the model is being loaded. Ray Data starts while the first steps are trained, whose
    samples rank 0 reads itself.
    """
    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.launch.ray.tasks.batches import ray_batches
    from raytune_fsdp.launch.ray.tasks.stream import first_samples, split, stream_dataset

    division, state = standing.plan.division, standing.state
    steps = standing.steps_left
    if not steps:  # only its last evaluation is left
        reached("data")
        return iter(())
    if rank == 0:
        stream = Stream(prepared.train, seed=job.config.run.seed)
        read, left, cursor = first_samples(stream, state.cursor, division, steps)
        prepared.train.forget()
        dataset = stream_dataset(
            stream,
            cursor,
            micro_batch=division.micro_batch,
            samples=division.samples_of_steps(left[0], left[-1]),
            first_block=division.first_micro_batch(left[0]),
        )
        job.board.share("batches", (read, split(dataset, division.data_ranks)))
    read, shards = job.board.shared("batches")
    layout = standing.plan.layout
    data_rank = layout.data_rank(rank)
    # A shard has one reader. Ranks that share samples get them from the first of these ranks.
    batches: Iterator[StepBatches | None] = (
        ray_batches(shards[data_rank], prepared.train, division, steps, data_rank=data_rank, first=read)
        if rank % layout.together == 0
        else repeat(None, len(steps))
    )
    first = in_thread(lambda: next(batches), "first-batch")
    first.add_done_callback(lambda _: reached("data"))

    def first_batch() -> Iterator[StepBatches | None]:
        if job.config.eval.at_start and standing.begins:
            reached("evaluation")  # the evaluation comes before the first batch is asked for
        yield first.result()
        reached("step")

    return chain(first_batch(), batches)


def _device(job: RankJob, rank: int, node: str) -> Any:
    import torch
    from ray.train.torch import get_device

    from raytune_fsdp.base.errors import ConfigError

    if job.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"rank {rank} on {node} has got a GPU from Ray, but its torch {torch.__version__} cannot use CUDA: install "
            "the CUDA build and the driver on all nodes, or set cluster.device=cpu"
        )
    from raytune_fsdp.launch.worker import use_gpu

    device = get_device()
    use_gpu(device)
    return device


def _as_placed(predicted: Predicted | NotPredicted | None, world: int) -> Predicted | NotPredicted | None:
    """Drop the time that is predicted if there are several nodes: the driver does not know where Ray puts ranks."""
    from raytune_fsdp.base.measured import Predicted

    if isinstance(predicted, Predicted) and ray.train.get_context().get_local_world_size() < world:
        return replace(predicted, seconds=None)
    return predicted
