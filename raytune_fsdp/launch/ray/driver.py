"""Drive a run on a Ray cluster: check it, start Ray, ask for workers, follow them to the end.

Ray Train starts the ranks of one attempt and sees when one is lost. The manifests of the checkpoints decide where the
run stands; rank 0 of every attempt reads them.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import ConfigError, Interrupted, RaytuneError
from raytune_fsdp.base.hushed import is_verbose
from raytune_fsdp.base.lease import TakenOverError, lease_of
from raytune_fsdp.base.measured import NotPredicted, Predicted
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.census import Places, build_here
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.launch.environment import environment, settings_of_nccl
from raytune_fsdp.launch.notices import notices_of
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray.asked import heeding_requests
from raytune_fsdp.launch.ray.attempts import Attempts
from raytune_fsdp.launch.ray.board import Board
from raytune_fsdp.launch.ray.failures import ControllerWatch, underlying
from raytune_fsdp.launch.ray.keepers import NodeKeepers
from raytune_fsdp.launch.ray.nodes.hub_reach import check_reach
from raytune_fsdp.launch.ray.nodes.sizes import Demand, Sizes, that_are_free
from raytune_fsdp.launch.ray.private_train import WorkerGroupStartupTimeoutError
from raytune_fsdp.launch.ray.rank import RankJob, train_rank
from raytune_fsdp.launch.ray.resources import (
    Node,
    Request,
    able,
    accelerators_of,
    check_resources,
    gpus_of,
    may_grow,
    nodes,
    request,
    room,
    scaling_config,
)
from raytune_fsdp.launch.ray.session import Session
from raytune_fsdp.launch.ray.supervisor import AttemptSupervisor
from raytune_fsdp.launch.ray.tasks.after_commit import AfterCommit, Chore
from raytune_fsdp.launch.ray.tasks.evaluations import Evaluations
from raytune_fsdp.launch.ray.tasks.exports import Exports
from raytune_fsdp.launch.ray.tasks.stream import build_on_ray
from raytune_fsdp.launch.ray.train_registry import repair_registry
from raytune_fsdp.launch.shared_storage import Token, put_token, remove_tokens
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.plan.counts import WindowCounts
from raytune_fsdp.plan.plan import Plan, resolve, sizes_of
from raytune_fsdp.plan.run_dir import storage_of
from raytune_fsdp.predict.devices import most_memory
from raytune_fsdp.predict.preflight import (
    check_attention,
    check_memory,
    check_room,
    device_named,
    is_too_much,
    predict_for_run,
)
from raytune_fsdp.record import names
from raytune_fsdp.record.copies.mlflow import mlflow_installed
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.screen_messages import Looks
from raytune_fsdp.run.checks import check_device, idle_gpus
from raytune_fsdp.run.open_record import RANKS_WAIT_SECONDS, mlflow_tracker, run_start
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs, on_world

logger = logging.getLogger(__name__)

FEW_WINDOWS = 4
"""Up to this number of windows are built in this process: tasks would first have to wait until Ray has started (about
3 s, see docs/results.md), and then for processes of their own."""

_HURRY_SECONDS = 2.0
"""How long MLflow may take where the cluster's head does not answer: its server may be there, and Ray soon ends this
process."""

_STORAGE_MARKER = ".validate_storage_marker"
"""A file that Ray Train writes into the run directory."""

RAY_TRAIN = {
    # How often Ray Train looks for dead ranks and reported checkpoints. With its default, 2 s, a crash was noticed
    # after 1.3 s instead of 0.3 s (2026-11-22).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # An actor per worker group that asks for draining nodes every 5 s: the driver asks once a second (supervisor.py).
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths must mean the same on ranks as in the job
}
"""Settings of Ray Train, which it reads from the environment when a run starts."""


def run_on_ray(
    config: FinetuneConfig,
    connecting: Future[Session],
    *,
    signals: Signals,
    phases: Phases,
    progress: Progress | None,
    say: Callable[[str], None],
    dry: bool = False,
    force: bool = False,
    trust_places: bool = False,
) -> tuple[RunInputs, ResumePoint]:
    """Prepare and train. Returns the run, and where it stood before, once it is complete; raises what stopped it."""
    phases.finished("start")

    def build(windows: Windows, places: Places) -> Iterable[tuple[WindowCounts, bool]]:
        if len(places) <= FEW_WINDOWS:
            return build_here(windows, places)
        connecting.result()
        return build_on_ray(windows, places)

    world = sizes_of(config)[0]
    prepared, standing = prepare(config, world, progress, build=build, dry=dry, trust_places=trust_places)
    phases.finished("checks")
    session = connecting.result()
    signals.take()  # Ray has installed a SIGTERM handler that prints a stack and aborts
    phases.finished("Ray")
    say(f"Ray: {session.about}")
    if session.head is None and config.tracking.prometheus.enabled:
        say("Prometheus: a Ray that is started for a run serves no metrics; begin one with `ray start --head` before")
    if standing.complete:
        if config.export.every is not None or config.eval.where == "task":
            _make_up(config, prepared, standing, session, signals, say)
        return prepared, standing
    board = Board()  # its process takes nothing of the cluster, and starts while the run is checked against that
    try:
        sizes, demand, foresight = _sized(config, prepared, standing, force=force, say=say)
    except BaseException:
        board.close(0)
        raise
    standing = on_world(config, prepared, standing, sizes.fewest.workers)
    with environment(RAY_TRAIN), heeding_requests(prepared.place, signals):
        _train(
            config, prepared, standing, sizes, demand, foresight,
            board=board, session=session, signals=signals, phases=phases, say=say,
        )  # fmt: skip
    return prepared, standing


def _sized(
    config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, *, force: bool, say: Callable[[str], None]
) -> tuple[Sizes, Demand, Foresight]:
    """Return the numbers of ranks that attempts may have; refuse what cannot run on this cluster."""
    found = nodes()
    growing = may_grow()
    asked = request(config.cluster, found, growing=growing)
    valid = sizes_of(config, asked.workers)
    check_resources(replace(asked, workers=valid[0]), found, growing=growing)
    check_device(config, asked.device)
    if idle := idle_gpus(config.cluster, asked.device, valid[0], gpus_of(config.cluster, found)):
        say("; ".join(idle))
    check_attention(config, prepared, asked.device)
    reaching = in_thread(lambda: check_reach(prepared, standing, able(asked, found)), "reach")
    foresight = Foresight(config, prepared, asked, found, force=force)
    # What cannot fit is refused before any rank is asked for, and no attempt has a number of ranks that cannot.
    valid = foresight.that_fit(valid, None if growing else room(asked, found), say)
    if config.cluster.workers == "auto" and not growing:
        valid = [that_are_free(asked, lambda size: _is_possible(config, foresight, size), nodes, say)]
    reaching.result()
    sizes = Sizes(asked, valid)
    demand = Demand(asked, valid if growing and len(valid) > 1 else [])
    return sizes, demand, foresight


def _is_possible(config: FinetuneConfig, foresight: Foresight, size: int) -> bool:
    try:
        sizes_of(config, size)
    except ConfigError:
        return False
    return foresight.force or foresight.fits(size)


def _train(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    sizes: Sizes,
    demand: Demand,
    foresight: Foresight,
    *,
    board: Board,
    session: Session,
    signals: Signals,
    phases: Phases,
    say: Callable[[str], None],
) -> None:
    place, run_dir = prepared.place, prepared.place.path
    remove_tokens(run_dir, lease_of(place.lock))
    token = put_token(run_dir, "the driver")
    attempts = Attempts(
        place, limit=config.cluster.max_failures, step=standing.state.step, answers=session.answers, say=say
    )
    after_commits = _after_commits(config, prepared, standing.plan, token, session, event=attempts.event, say=say)
    try:
        supervisor = AttemptSupervisor(
            config, place, attempts, sizes, after_commits,
            demand=demand, board=board, session=session, signals=signals, phases=phases, say=say, dry=prepared.dry,
            keepers=NodeKeepers(0 if prepared.dry else config.checkpoint.peer_copies, board, say),
        )  # fmt: skip
        job = RankJob(
            config=config,
            prepared=ray.put((prepared, standing)),
            first=True,
            board=board,
            device=sizes.fewest.device,
            token=token,
            looks=Looks.of(sys.stdout),
            verbose=is_verbose(),
            in_ray_log=session.owned,  # a caller's Ray may print its processes' logs to the caller's screen
            forced=foresight.force,
            notices=notices_of(config.cluster, os.environ, ray=True),
        )
        try:
            _fit(job, run_dir, supervisor, attempts, sizes, foresight)
        finally:
            supervisor.end()
    except RaytuneError as error:
        for each in after_commits:
            each.cancel()
        lease = lease_of(place.lock)
        if isinstance(error, TakenOverError) or (lease is not None and lease.lost()):
            pass  # another command owns the run now
        elif attempts.number:
            _close_mlflow(config, prepared, standing, attempts, session, error, say)
        else:
            (run_dir / _STORAGE_MARKER).unlink(missing_ok=True)
        raise
    else:
        _finish(after_commits, signals, session.lost, say)
    finally:
        remove_tokens(run_dir, lease_of(place.lock))
        token.remove(refused=not attempts.number)


def _after_commits(
    config: FinetuneConfig,
    prepared: RunInputs,
    plan: Plan,
    token: Token,
    session: Session,
    *,
    event: Callable[..., None],
    say: Callable[[str], None],
) -> list[AfterCommit]:
    """Return the work on committed checkpoints that is done while training goes on."""
    place, trust, work = prepared.place, config.model.trust_remote_code, list[Chore]()
    env = _env(config)
    if config.eval.where == "task":
        if off := Evaluations.off(config.eval):
            say(off)
        else:
            work.append(Evaluations(config, prepared, plan, token, env=env, event=event, say=say))
    if plan.export_every is not None:
        chosen, every = config.export, plan.export_every
        work.append(Exports(chosen, every, place, token, trust_remote_code=trust, env=env, event=event, say=say))
    return [AfterCommit(each, place, session.answers, say) for each in work]


def _env(config: FinetuneConfig) -> dict[str, Any] | None:
    """Return the environment of ranks, and of tasks that use a model as ranks do."""
    wanted = settings_of_nccl(config, os.environ) | config.cluster.env
    return {"env_vars": wanted} if wanted else None


def _finish(
    after_commits: Sequence[AfterCommit], signals: Signals, lost: Callable[[], str | None], say: Callable[[str], None]
) -> None:
    """Wait for what is left to do of a complete run."""
    for number, each in enumerate(after_commits):
        if not each.finish(lambda: signals.count > 0, lost):
            if (gone := lost()) is not None:
                say(f"{gone}: the same command makes up for the {each.work.what}s")
                return
            for left in after_commits[number:]:
                left.cancel()
            raise Interrupted(
                f"stopped: the run is complete, but its {each.work.what}s are not; the same command makes up for them"
            )


def _make_up(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    session: Session,
    signals: Signals,
    say: Callable[[str], None],
) -> None:
    """Do the work on a complete run's checkpoints that an earlier command did not get to."""
    place = prepared.place
    signals.hold()  # from here on a signal ends the wait for a task, and says so
    token = put_token(place.path, "the driver")

    def event(name: str, **fields: object) -> None:
        append_event(place.events, name, attempt=standing.state.attempt, fields=fields)

    try:
        _finish(
            _after_commits(config, prepared, standing.plan, token, session, event=event, say=say),
            signals,
            session.lost,
            say,
        )
    finally:
        token.remove(refused=False)


def _fit(
    job: RankJob, run_dir: Path, supervisor: AttemptSupervisor, attempts: Attempts, sizes: Sizes, foresight: Foresight
) -> None:
    """Let Ray Train run the job to its end, an attempt at a time."""
    while True:
        asked = supervisor.next()
        job = replace(job, predicted=foresight.of(asked.workers))
        repaired = repair_registry(run_dir)  # every fit() reads it
        if repaired is not None:
            attempts.event(names.REGISTRY_REPAIRED, what=repaired)
        job.board.begin()
        # Not as train_loop_config: the controller unpickles that, and would have to import torch for it.
        fit = in_thread(trainer_for(partial(train_rank, job), job.board, asked, job.config).fit, "fit")
        supervisor.until(fit, asked)
        error = attempts.current.failure(fit)
        if error is None:
            return
        attempts.ended(error)
        job = replace(job, first=False)
        if isinstance(underlying(error), WorkerGroupStartupTimeoutError):
            sizes.did_not_come(asked.workers)
            continue
        sizes.ended()
        # A new object, which only this node has. Ray asks any node that has a copy of the old one, also one that has
        # died and is not known to be dead yet (for 13 s), and the next node only after 10 s: so it was in 3 of 6 tries.
        job = replace(job, prepared=ray.put(ray.get(job.prepared)))


def trainer_for(rank: Callable[[], None], board: Board, asked: Request, config: FinetuneConfig) -> TorchTrainer:
    """Return the TorchTrainer that runs `rank` in every worker, once."""
    logging.getLogger("ray.train").setLevel(logging.ERROR)  # it repeats, for developers, what we report
    return TorchTrainer(
        rank,
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if asked.device == "cuda" else "gloo",
            timeout_s=math.ceil(60 * config.cluster.collective_minutes),
        ),
        scaling_config=scaling_config(asked),
        run_config=RunConfig(
            name=config.run.name,
            storage_path=storage_of(config).as_posix(),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),  # see attempts.py
            # Keep all: pruning is done by rank 0 after a commit, by step and score; Ray's own would delete others.
            checkpoint_config=CheckpointConfig(num_to_keep=None),
            callbacks=[ControllerWatch(board)],
            worker_runtime_env=_env(config),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _close_mlflow(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    attempts: Attempts,
    session: Session,
    error: RaytuneError,
    say: Callable[[str], None],
) -> None:
    """Record in MLflow how the run ended: rank 0, which usually does that, may have had no time."""
    place = prepared.place
    if config.tracking.mlflow.enabled and place.mlflow_id.exists() and mlflow_installed():
        tracker = mlflow_tracker(config, place, seconds=RANKS_WAIT_SECONDS if session.answers() else _HURRY_SECONDS)
        start = run_start(config, prepared, standing, attempts.number)
        tracker.start(replace(start, over=True, committed=attempts.last_step()))
        tracker.finish("interrupted" if isinstance(error, Interrupted) else "failed")
        if tracker.unsent is not None:
            say(tracker.unsent)


class Foresight:
    """The planner's predictions of ranks, for each number of them that an attempt has. Each is made once."""

    def __init__(
        self, config: FinetuneConfig, prepared: RunInputs, asked: Request, nodes: Sequence[Node], *, force: bool
    ) -> None:
        self._config, self._prepared, self._kind = config, prepared, asked.device
        kinds = {kind for node in nodes for kind in accelerators_of(node) if asked.device == "cuda"}
        self._device = device_named(kinds.pop() if len(kinds) == 1 else None)
        """The kind of GPU; None: there are several, or Ray does not say."""
        # Ray calls an H100 NVL, which has 94 GB, an H100, too: it must not be refused what fits. Ranks look again.
        self._memory = None if self._device is None else most_memory(self._device)
        self._per_node = max((int(node.total.get("GPU", 0)) for node in nodes), default=0) or 8
        self.force = force
        """Whether to start even what does not fit."""
        self._found: dict[int, Predicted | NotPredicted] = {}
        self._checked = set[int]()

    def that_fit(self, sizes: Sequence[int], room: int | None, say: Callable[[str], None]) -> list[int]:
        """Return which of these numbers of ranks an attempt can have.

        Refuse the run, unless it is forced, if not even the largest fits that the cluster has `room` for (None: nodes
        may come). This needs a kind of GPU that says how much memory there is; otherwise the ranks find it out.
        """
        possible = [size for size in sorted(sizes) if room is None or size <= room] or [min(sizes)]
        most = possible[-1]
        self._check(most, forced=self.force)
        check_room(self._config, self._prepared, self._plan(most), self._predicted(most), forced=self.force, say=say)
        if self.force or self.fits(possible[0]):
            return list(sizes)
        fewest = possible[bisect_left(possible, True, key=self.fits)]  # more ranks keep less each
        logger.warning(
            "cluster.workers.min=%d: the run does not fit on fewer than %d ranks, so it waits for these; set "
            "cluster.workers.min=%d", possible[0], fewest, fewest,
        )  # fmt: skip
        return [size for size in sizes if size >= fewest]

    def of(self, ranks: int) -> Predicted | NotPredicted:
        """Return the prediction for an attempt with this number of ranks. Refuse nothing."""
        if ranks not in self._checked:
            self._check(ranks, forced=True)
        return self._predicted(ranks)

    def _check(self, ranks: int, *, forced: bool) -> None:
        self._checked.add(ranks)
        check_memory(
            self._config, self._prepared, self._plan(ranks), self._predicted(ranks),
            kind=self._kind, memory=self._memory, forced=forced,
        )  # fmt: skip

    def fits(self, ranks: int) -> bool:
        found = self._predicted(ranks)
        return self._memory is None or isinstance(found, NotPredicted) or not is_too_much(found, self._memory)

    def _predicted(self, ranks: int) -> Predicted | NotPredicted:
        if ranks not in self._found:
            self._found[ranks] = predict_for_run(
                self._config, self._prepared, self._plan(ranks), self._kind, self._device, self._per_node
            )
        return self._found[ranks]

    def _plan(self, ranks: int) -> Plan:
        return resolve(self._config, ranks, self._prepared.census)
