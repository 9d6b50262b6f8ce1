"""Run ranks on this machine without Ray: one in this process, several processes that we start, or torchrun's."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from raytune_fsdp.base import errors
from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import ConfigError, Interrupted, RaytuneError, TrainingError
from raytune_fsdp.base.measured import NotPredicted, Predicted, StepMetrics
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.environment import environment, settings_of_nccl
from raytune_fsdp.launch.imported import STARTING, check_not_called, check_script, starting
from raytune_fsdp.launch.notices import notices_of
from raytune_fsdp.launch.phases import HERE, TOGETHER, Phases
from raytune_fsdp.launch.shared_storage import check_shared, remove_tokens
from raytune_fsdp.launch.signals import Signals, StopFlag, deaf_children, hear_no_ctrl_c, listening, stacks_at_signal
from raytune_fsdp.launch.torchrun import Meeting, is_rank0, meet, ranks_here, under_torchrun, world_of_torchrun
from raytune_fsdp.launch.worker import alone, choose_device, gpus_here, join, work
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.predict.preflight import preflight
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.tracker import Tracker
from raytune_fsdp.run.assemble import LauncherHooks
from raytune_fsdp.run.checks import check_device, idle_gpus
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs, agree
from raytune_fsdp.step.parallel import memory_of

T = TypeVar("T")

_LOOK_SECONDS = 0.2
"""How soon a dead rank is noticed, in seconds."""
_SIGN_SECONDS = 1.0
_SIGNS, _PREPARED = "raytune_fsdp/signs", "raytune_fsdp/prepared"
"""Keys of the store where ranks meet: how often rank 0 has said that it lives, and that the others may join it."""
SHUTDOWN_SECONDS = 120
"""Ranks that have to end get this long to save, or to notice that another rank died. torch's default is 30."""


def world_size(config: FinetuneConfig) -> int:
    """Return the number of ranks that this config asks for on this machine."""
    if under_torchrun():
        return world_of_torchrun()
    gpus = gpus_here()
    wanted = config.cluster.most
    if wanted is not None:
        if config.cluster.device == "cuda" and wanted > gpus:
            raise ConfigError(
                f"cluster.workers={wanted} with cluster.device=cuda, but this machine has {gpus} "
                f"GPU{'s' * (gpus != 1)}: lower cluster.workers, or set cluster.device=cpu"
            )
        return wanted
    check_gpus(config)
    return max(1, gpus) if config.cluster.device != "cpu" else 1


def check_gpus(config: FinetuneConfig) -> None:
    """Refuse `cluster.device: cuda` where torch has no GPU."""
    if config.cluster.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("cluster.device=cuda, but this machine has no GPU that torch can use: set cluster.device=cpu")


def _check_gpus_of_torchrun(config: FinetuneConfig) -> None:
    """Refuse fewer GPUs than ranks: on the CPU they would wait for those on the GPUs of other machines."""
    gpus, ranks = gpus_here(), ranks_here()
    together = config.cluster.device == "cuda" or ranks < world_of_torchrun()
    if config.cluster.device != "cpu" and together and 0 < gpus < ranks:
        raise ConfigError(
            f"torchrun has started {ranks} ranks on this machine, where torch can use {gpus} GPU{'s' * (gpus != 1)}: "
            f"set --nproc-per-node={gpus}, or cluster.device=cpu"
        )


def run(
    config: FinetuneConfig,
    progress: Progress | None = None,
    *,
    dry: bool = False,
    force: bool = False,
    trust_places: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[RunInputs, ResumePoint]:
    """Prepare and train. Returns the run and its resume point when it is complete; raises what stopped it."""
    if under_torchrun():
        return _run_rank(config, dry, force, say, trust_places=trust_places)
    world = world_size(config)
    device = choose_device(config.cluster.device, world)
    check_device(config, device.type)
    if idle := idle_gpus(config.cluster, device.type, world, torch.cuda.device_count()):
        say("; ".join(idle))
    if world > 1:
        check_script()
    phases = Phases(HERE if world == 1 else TOGETHER)
    with Signals():
        prepared, standing = prepare(config, world, progress, dry=dry, trust_places=trust_places)
        if not standing.complete:
            predicted = _preflight(config, prepared, standing, device, ranks=world, force=force, say=say)
    phases.finished("checks")
    if standing.complete:
        return prepared, standing
    if world == 1:
        _alone(config, prepared, standing, phases, predicted)
    else:
        # In a dry run, what ranks leave is inside the run's directory, where everything is removed, also after a kill.
        start_ranks(
            _rank_main, (config, prepared, standing, phases, predicted), world, name=config.run.name,
            then="the same command continues from the last checkpoint",
            where=prepared.place.path if prepared.dry else None,
        )  # fmt: skip
    return prepared, standing


def _preflight(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    device: torch.device,
    *,
    ranks: int,
    force: bool,
    say: Callable[[str], None],
) -> Predicted | NotPredicted:
    """Predict whether `ranks` ranks on this machine have enough memory; refuse if not, unless `force`."""
    cuda = device.type == "cuda"
    return preflight(
        config, prepared, standing.plan, device.type, torch.cuda.get_device_name(device) if cuda else None,
        memory=memory_of(device), ranks=1 if cuda else ranks, per_node=ranks, forced=force, say=say,
    )  # fmt: skip


@stacks_at_signal()
def _alone(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    phases: Phases,
    predicted: Predicted | NotPredicted,
) -> None:
    device = choose_device(config.cluster.device, 1)
    stop = StopFlag()
    with stop:
        with alone(device):
            notices = notices_of(config.cluster, os.environ, ray=False)
            first = FirstStep(phases, prepared.place)
            hooks = LauncherHooks(trackers=[first], reached=phases.finished, predicted=predicted, notices=notices)
            work(config, prepared, agree(config, prepared, lambda: standing), device, stop, hooks)
        stop.check_export(config.export.at_end)


def start_ranks(
    main: Callable[..., Any],
    inputs: Sequence[Any],
    world: int,
    *,
    name: str,
    then: str = "the same command continues",
    where: Path | None = None,
) -> None:
    """Start `world` processes on this machine and wait for them. If one fails, the others are ended.

    Each calls `main(*inputs, file)`, with the file that has the inputs, and which may be removed once all are there.
    `then`: how to go on after a failure. `where`: a directory for files that the processes leave if they are killed.
    """
    for logger in list(logging.root.manager.loggerDict):
        if logger.startswith("torch.distributed.elastic"):  # they repeat what we report, for developers
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    # Divide the cores among the ranks: by default torch takes all of them in every process, and ranks compete.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}
    # Older versions of torch lack this field; they always wait for 30 seconds.
    known = "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}
    patience: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_SECONDS} if known else {}
    try:
        with (
            TemporaryDirectory(prefix="raytune-fsdp-", dir=where, ignore_cleanup_errors=True) as logs,
            environment({**threads, **starting(logs)}),
            deaf_children(),
        ):
            launch = LaunchConfig(
                logs_specs=DefaultLogsSpecs(logs),
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=world,
                run_id=name,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",  # any free port
                # Where they meet. By default by this machine's name, which may lead nowhere, or to a VPN that is away.
                local_addr="127.0.0.1",
                max_restarts=0,
                monitor_interval=_LOOK_SECONDS,
                start_method="spawn",  # a fork of a process that uses threads or CUDA may hang
                **patience,
            )
            # Not as arguments: a process that dies before it has read as much as fills a pipe (64 KiB) would leave this
            # one waiting for it.
            file = Path(logs, "inputs.pkl")
            file.write_bytes(pickle.dumps((main, *inputs)))
            try:
                elastic_launch(launch, _rank_process)(file)
            except Exception:
                check_not_called(logs)
                raise
    except SignalException as signal:
        raise Interrupted(f"stopped by {signal.sigval.name}; {then}") from signal
    except ChildFailedError as failed:
        raise _cause(failed, then) from None


def _rank_process(inputs: Path) -> Any:
    """Run a process that elastic_launch started."""
    os.environ.pop(STARTING, None)
    # `record` has written the error. If torch saw the exception, it would leave a file behind (pytorch-errorfile-*).
    try:
        main, *arguments = record(_read)(inputs) or ()
        return main(*arguments, inputs)
    except RaytuneError:
        raise SystemExit(1) from None
    except Exception:
        # The death of another rank may have led to this. If several ranks have ended between two looks, torch names the
        # first by number: wait, so that the other rank's end is seen before ours.
        time.sleep(3 * _LOOK_SECONDS)
        raise SystemExit(1) from None


def _read(inputs: Path) -> tuple[Any, ...]:
    """Return the function to call, and its arguments."""
    found: tuple[Any, ...] = pickle.loads(inputs.read_bytes())
    return found


@record
@stacks_at_signal()
def _rank_main(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    phases: Phases,
    predicted: Predicted | NotPredicted,
    inputs: Path,
) -> int:
    # Without `insist`: Ctrl-C reaches this process twice, from the terminal and from elastic_launch.
    stop = StopFlag(insist=False)
    hear_no_ctrl_c()
    with stop, listening():
        device = choose_device(config.cluster.device, ranks_here())
        _join(config, device)
        hooks = None
        if dist.get_rank() == 0:
            inputs.unlink(missing_ok=True)  # all have read it, and it has the values of cluster.env
            phases.finished("workers")
            notices = {**notices_of(config.cluster, os.environ, ray=False), "ranks": SHUTDOWN_SECONDS}
            first = FirstStep(phases, prepared.place)
            hooks = LauncherHooks(trackers=[first], reached=phases.finished, predicted=predicted, notices=notices)
        try:
            step = work(config, prepared, agree(config, prepared, lambda: standing), device, stop, hooks)
        except Interrupted:
            # All ranks have agreed to stop, so none waits for another. If threads of the group are left, the end of the
            # interpreter may be an abort ("terminate called without an active exception").
            dist.destroy_process_group()
            raise
        dist.destroy_process_group()
        return step


@stacks_at_signal()
def _run_rank(
    config: FinetuneConfig,
    dry: bool = False,
    force: bool = False,
    say: Callable[[str], None] = print,
    *,
    trust_places: bool = False,
) -> tuple[RunInputs, ResumePoint]:
    """Run the rank of a process that torchrun started; rank 0 prepares for all."""
    _check_gpus_of_torchrun(config)
    device = choose_device(config.cluster.device, ranks_here())
    check_device(config, device.type)
    if is_rank0() and (idle := idle_gpus(config.cluster, device.type, world_of_torchrun(), torch.cuda.device_count())):
        say("; ".join(idle))
    stop = StopFlag(insist=False)

    def look() -> tuple[RunInputs, ResumePoint, Predicted | NotPredicted | None]:
        prepared, standing = prepare(config, world_of_torchrun(), dry=dry, trust_places=trust_places)
        if standing.complete:
            return prepared, standing, None
        remove_tokens(prepared.place.path, prepared.lease)
        ranks = ranks_here()
        return prepared, standing, _preflight(config, prepared, standing, device, ranks=ranks, force=force, say=say)

    minutes = config.cluster.collective_minutes
    with stop:
        meeting = meet(minutes)
        # Before rank 0 joins the others, who get the result then: the planner needs a process group of its own.
        if is_rank0():
            with _waited_for(meeting):
                found = _beforehand(look)
        else:
            while not _wait_for_rank0(meeting, minutes):
                meeting = meet(minutes)
            found = look
        _join(config, device, meeting)
        try:
            prepared, standing, predicted = on_rank0(found, what="prepare the run")
            standing = agree(config, prepared, lambda: standing)
            if not standing.complete:
                check_shared(prepared.place.path)
                hooks = LauncherHooks(predicted=predicted, notices=notices_of(config.cluster, os.environ, ray=False))
                work(config, prepared, standing, device, stop, hooks)
        except BaseException:
            if device.type == "cpu":  # NCCL would wait for ranks that have not failed, and torchrun for this one
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()
        stop.check_export(config.export.at_end)
    return prepared, standing


class FirstStep(Tracker):
    """Puts on record how long rank 0 took until its first step. Under Ray the driver does that, which knows more."""

    def __init__(self, phases: Phases, place: RunDir) -> None:
        self._phases: Phases | None = phases
        self._events = place.events

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        if metrics and (phases := self._phases) is not None:
            self._phases = None
            phases.finished("step")
            fields = {"seconds": round(phases.total, 2), "phases": phases.seconds}
            append_event(self._events, names.FIRST_STEP, attempt=attempt, fields=fields)


def _beforehand(work: Callable[[], T]) -> Callable[[], T]:
    """Call `work` now, and return a function that returns its result, or raises its error, later."""
    outcome: Future[T] = Future()
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result


@contextmanager
def _waited_for(meeting: Meeting) -> Iterator[None]:
    """Let the other ranks know that this one lives, for however long the context lasts, and then that they may join."""
    over, store = Event(), meeting.store

    def say() -> None:
        with suppress(dist.DistError):  # joining the others reports it
            while not over.wait(_SIGN_SECONDS):
                store.add(_SIGNS, 1)
                meeting.answer()

    thread = Thread(target=say, name="signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    store.set(_PREPARED, "")


def _wait_for_rank0(meeting: Meeting, minutes: float) -> bool:
    """Return when rank 0 has prepared the run: who has joined waits for it no longer than for a step.

    False: it was started again meanwhile, and waits at another meeting.
    """
    store, signs, heard = meeting.store, -1, time.monotonic()
    try:
        while not store.check([_PREPARED]):
            if meeting.is_over():
                return False
            newest, now = store.add(_SIGNS, 0), time.monotonic()
            if newest != signs:
                signs, heard = newest, now
            elif now > heard + 60 * minutes:
                raise TrainingError(
                    f"rank 0 prepares the run, and has given no sign of life for cluster.collective_minutes={minutes:g}"
                    ": see what it has printed and whether its storage answers; `raytune-fsdp data stats` prepares the "
                    "data before the run starts"
                )
            time.sleep(_SIGN_SECONDS)
    except dist.DistError as error:
        raise TrainingError(
            f"rank 0 has ended before the run was prepared ({error}): see what it has printed; the same command "
            "continues"
        ) from error
    return True


def _join(config: FinetuneConfig, device: torch.device, at: Meeting | None = None) -> None:
    parallel = config.parallel
    copies = parallel.strategy in ("hybrid_shard", "replicate")
    subgroups = copies or parallel.mesh.together > 1 or parallel.reduce == "hierarchical"
    os.environ.update(settings_of_nccl(config, os.environ))
    join(device, alone=False, minutes=config.cluster.collective_minutes, subgroups=subgroups, at=at)


def _cause(failed: ChildFailedError, then: str) -> RaytuneError:
    """Return the error that the first failing rank raised. `then`: how to go on."""
    rank, failure = failed.get_first_failure()
    # For an exception `record` has written a dict; if the process died, the message is a string.
    message = failure.message.get("message", "") if isinstance(failure.message, dict) else failure.message
    name, _, text = message.partition(": ")
    kind = errors.DataError if name == errors.RowError.__name__ else getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RaytuneError):
        return kind(text)
    if failure.exitcode < 0:
        return TrainingError(f"rank {rank} was killed by {failure.signal_name()}; {then}")
    return TrainingError(f"rank {rank} failed: {message}")
