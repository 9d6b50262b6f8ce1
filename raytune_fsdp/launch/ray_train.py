"""A run on a Ray cluster, seen from the driver: check, start Ray, ask for workers, follow them to the end.

Ray Train starts the ranks and starts them again when one is lost. Where the run stands is ours: the manifests of the
checkpoints, read by rank 0 of every attempt.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

import ray
from ray.exceptions import RayError
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.census import Places, build_here
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import Interrupted, RaytuneError, TrainingError, UserError
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray_board import Board
from raytune_fsdp.launch.ray_data import build_on_ray
from raytune_fsdp.launch.ray_exports import Exports
from raytune_fsdp.launch.ray_failures import FailureWatch, first_cause, in_words, underlying
from raytune_fsdp.launch.ray_follow import Follow
from raytune_fsdp.launch.ray_registry import repair_registry
from raytune_fsdp.launch.ray_resources import Request, check, may_grow, nodes, request, scaling_config
from raytune_fsdp.launch.ray_session import Session
from raytune_fsdp.launch.ray_worker import Job, train_rank
from raytune_fsdp.launch.shared import TOKEN_PREFIX, leave_token
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.launch.worker import COLLECTIVE_MINUTES
from raytune_fsdp.prepare import Prepared, on_world, prepare
from raytune_fsdp.record import MLFLOW_ID_FILE, mlflow_tracker, run_start
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.jsonl import EVENTS_FILE, append_event
from raytune_fsdp.tracking.mlflow import mlflow_installed
from raytune_fsdp.types import Progress, WindowCounts

FEW_WINDOWS = 4
"""So many are built in this process: tasks on the cluster would take longer to start."""

_STORAGE_MARKER = ".validate_storage_marker"
"""Ray Train's."""
T = TypeVar("T")

# How soon Ray Train sees that a rank has died, and a checkpoint that was reported; two seconds are its default.
_POLL_SECONDS = "0.5"


def run(
    config: FinetuneConfig,
    connecting: Future[Session],
    *,
    signals: Signals,
    phases: Phases,
    progress: Progress | None,
    say: Callable[[str], None],
) -> Prepared:
    """Prepare and train. Returns when the run is complete; raises what stopped it."""
    wanted = config.cluster.workers
    phases.finished("start")
    prepared = prepare(config, 1 if wanted == "auto" else wanted, progress, build=_builder(connecting))
    phases.finished("checks")
    session = connecting.result()
    signals.take()  # Ray's own handler of SIGTERM prints where the process is, and aborts it
    phases.finished("Ray")
    say(f"Ray: {session.about}")
    if prepared.state.step >= prepared.plan.steps:
        if config.export.every is not None:
            _make_up(config, prepared, signals, say)
        return prepared
    found = nodes()
    growing = may_grow()
    asked = request(config.cluster, found, growing=growing)
    check(asked, found, growing=growing)
    prepared = on_world(config, prepared, asked.workers)
    _train(config, prepared, asked, signals=signals, phases=phases, say=say)
    return prepared


def _builder(connecting: Future[Session]) -> Callable[[Windows, Places], Iterable[tuple[WindowCounts, bool]]]:
    def build(windows: Windows, places: Places) -> Iterable[tuple[WindowCounts, bool]]:
        if len(places) <= FEW_WINDOWS:
            return build_here(windows, places)
        connecting.result()
        return build_on_ray(windows, places)

    return build


def _train(
    config: FinetuneConfig,
    prepared: Prepared,
    asked: Request,
    *,
    signals: Signals,
    phases: Phases,
    say: Callable[[str], None],
) -> None:
    run_dir = prepared.plan.run_dir
    repaired = repair_registry(run_dir)
    for left in run_dir.glob(f"{TOKEN_PREFIX}*"):  # by a driver that was killed
        left.unlink(missing_ok=True)
    if repaired is not None:
        append_event(run_dir / EVENTS_FILE, names.REGISTRY_REPAIRED, attempt=0, fields={"what": repaired})
    token = leave_token(run_dir, "the driver")
    follow: Follow | None = None
    try:
        board = Board()
        follow = Follow(config, prepared, asked, board=board, token=token, signals=signals, phases=phases, say=say)
        job = Job(
            config=config,
            prepared=ray.put(prepared),
            board=board,
            device=asked.device,
            token=token,
            tty=sys.stdout.isatty(),
        )
        _fit(job, asked, follow)
    except RaytuneError as error:
        if follow is not None and follow.attempt:
            _close_mlflow(config, prepared, follow.attempt, error)
        else:
            (run_dir / _STORAGE_MARKER).unlink(missing_ok=True)
        raise
    else:
        _finish(follow.exports, signals)
    finally:
        token.remove(refused=follow is None or not follow.attempt)


def _finish(exports: Exports, signals: Signals) -> None:
    """The run is complete, its exports perhaps not."""
    if not exports.finish(lambda: signals.count > 0):
        raise Interrupted("stopped: the run is complete, its exports are not; the same command makes up for them")


def _make_up(config: FinetuneConfig, prepared: Prepared, signals: Signals, say: Callable[[str], None]) -> None:
    """Exports that an earlier start of a run that is complete did not come to."""
    plan = prepared.plan
    token = leave_token(plan.run_dir, "the driver")
    tell = partial(_tell, plan.run_dir / EVENTS_FILE, prepared.state.attempt)
    try:
        _finish(Exports(config.export, plan, token, event=tell, say=say), signals)
    finally:
        token.remove(refused=False)


def _tell(events: Path, attempt: int, name: str, **fields: object) -> None:
    append_event(events, name, attempt=attempt, fields=fields)


def _fit(job: Job, asked: Request, follow: Follow) -> None:
    """Let Ray Train run the job to its end. It gives up by itself where the ranks cannot be brought together."""
    limit = job.config.cluster.max_failures
    while True:
        left = limit if limit < 0 else max(0, limit - follow.failures)
        # The job is not given as train_loop_config: the controller reads that, and would import torch for it.
        fit = _in_thread(trainer_for(partial(train_rank, job), job.board, asked, job.config, left).fit)
        follow.until(fit)
        error = fit.exception()
        if error is None:
            return
        inner = underlying(error)
        if isinstance(inner, RaytuneError) or getattr(error, "worker_failures", None) or isinstance(inner, RayError):
            raise _what_stopped(error, follow) from None
        follow.failed(in_words(inner))
        follow.groups.clear()


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """The outcome of a call that cannot be interrupted. Not in a pool: the process may end before it does."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome


def trainer_for(
    rank: Callable[[], None], board: Board, asked: Request, config: FinetuneConfig, max_failures: int
) -> TorchTrainer:
    """Ray Train's part: so many processes that run `rank`, in a process group, again after a crash."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _POLL_SECONDS)
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nothing of ours listens to it yet
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # ranks stay where the job is, as relative paths expect
    logging.getLogger("ray.train").setLevel(logging.ERROR)  # it says again, for developers, what we say
    env = {"env_vars": dict(config.cluster.env)} if config.cluster.env else None
    return TorchTrainer(
        rank,
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if asked.device == "cuda" else "gloo", timeout_s=COLLECTIVE_MINUTES * 60
        ),
        scaling_config=scaling_config(asked),
        run_config=RunConfig(
            name=config.run.name,
            storage_path=Path(config.run.storage).expanduser().absolute().as_posix(),
            failure_config=FailureConfig(max_failures=max_failures),
            # Never: Ray would delete checkpoints that it knows less about than we do.
            checkpoint_config=CheckpointConfig(num_to_keep=None),
            callbacks=[FailureWatch(board)],
            worker_runtime_env=env,
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _close_mlflow(config: FinetuneConfig, prepared: Prepared, attempt: int, error: RaytuneError) -> None:
    """Say there how the run has ended: rank 0, which does that otherwise, may have had no time to."""
    recorded = (prepared.plan.run_dir / MLFLOW_ID_FILE).exists()
    if config.tracking.mlflow.enabled and recorded and mlflow_installed():
        tracker = mlflow_tracker(config, prepared.plan)
        tracker.start(run_start(config, prepared, attempt))
        tracker.finish("interrupted" if isinstance(error, Interrupted) else "failed")


def _what_stopped(error: BaseException, follow: Follow) -> RaytuneError:
    """The error that fit() has raised as one of ours."""
    inner = underlying(error)
    if isinstance(inner, Interrupted) or (isinstance(inner, UserError) and not follow.attempt):
        return inner
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, cause = first_cause(failures)
        return TrainingError(follow.describe(rank, in_words(cause)))
    if isinstance(inner, RaytuneError):
        return TrainingError(follow.describe(follow.culprit, in_words(inner)))
    return TrainingError(follow.describe(None, f"Ray: {in_words(inner)}"))
