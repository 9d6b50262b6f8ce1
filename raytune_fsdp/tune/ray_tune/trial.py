"""Runs as trials of Ray Tune: `tune.Tuner(RunTrial, param_space={"base": "my-run.yaml", "optim.lr": ...})`.

Tune decides; the run's own record and checkpoints are the truth about a trial. docs/design/tune.md has what Tune 2.60
does when, which all of this follows from.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, RESULT_DUPLICATE

from raytune_fsdp.base.durable import make_private
from raytune_fsdp.base.errors import RaytuneError, ResumeError, TrainingError
from raytune_fsdp.base.untrusted import is_count, read_json
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, checkpoint_at, committed, digest_of
from raytune_fsdp.checkpoint.on_demand import Asking, StopRequest
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.environment import SHARED
from raytune_fsdp.launch.notices import STOP_SECONDS as STOP_SECONDS_VARIABLE
from raytune_fsdp.launch.notices import seconds_in
from raytune_fsdp.launch.run_lock import Signs, holder_of
from raytune_fsdp.plan.run_dir import PLAN_FILE, RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.lines import step_of
from raytune_fsdp.record.report.overview import steps_of
from raytune_fsdp.record.tail import RecordFollower
from raytune_fsdp.tune.ray_tune.driven import STOP_SECONDS, RunDriver
from raytune_fsdp.tune.ray_tune.environment import environment_of_driver
from raytune_fsdp.tune.ray_tune.reference import (
    TrialReference,
    check_reference,
    config_of,
    hash_of,
    with_run,
)
from raytune_fsdp.tune.running.values import has_export

DRIVER_MEMORY = 1 << 30
"""What a trial asks Tune for: the memory of its actor and of the process that drives its run. No CPU: the ranks ask for
theirs, and a hundredth of one would leave a node without room for its last rank."""
LOG = Path("logs", "driver.txt")
"""What the process that drives the run prints, in the run's directory: that of Tune's actor goes with its session."""
_PLAN_BYTES = 16 << 20
_LOOK_SECONDS = 0.3
_IDLE_SECONDS = 10.0
"""How long a run goes on without a word of Tune's. With `reuse_actors` a trial that is paused or stopped hears of it
only when another one takes its actor."""
_PLANNED_SECONDS = 60.0
"""How long a reference waits for the checkpoint that the plan has at its step, before it asks for another."""
_ORIGINAL = "TUNE_ORIG_WORKING_DIR"
"""Variable of Tune's: where its actor was before Tune sent it into the trial's directory."""


class RunTrial(Trainable):  # type: ignore[misc]
    """A trial of Ray Tune that is a run: `<base's run.name>-<trial's id>` in the base's `run.storage`.

    `param_space` has `base` (a YAML file, a recipe's name or sections) and fields by their dotted names. A result is an
    evaluation: its metrics, `step`, and the `run`'s directory. The ranks ask Ray for their resources themselves, so say
    in `TuneConfig(max_concurrent_trials=...)` how many runs have room at the same time.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        return PlacementGroupFactory([{"memory": DRIVER_MEMORY}])

    def setup(self, config: dict[str, Any]) -> None:
        self._cwd = Path(os.environ.get(_ORIGINAL) or os.getcwd())
        self._seconds = seconds_in(os.environ, STOP_SECONDS_VARIABLE, STOP_SECONDS)
        self._driver: RunDriver | None = None
        self._trains = False
        self._lock, self._calls = threading.Lock(), 0
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Be another trial, or this one with other values, in the same process, and with the same driver."""
        with self._called():
            self._stop()
            self._begin(new_config)
        return True

    def _begin(self, given: Mapping[str, Any]) -> None:
        self._given = hash_of(given)
        self._base = config_of(given, self._cwd)
        self._be(f"{self._base.run.name}-{self.trial_id}", fork=None, seen=-1)

    def _be(self, name: str, *, fork: Mapping[str, Any] | None, seen: int) -> None:
        """Be this run, of which Tune has seen the evaluations up to that of step `seen`."""
        config = with_run(self._base, name=name)
        self._config = config if fork is None else with_run(config, fork=dict(fork))
        self._place, self._fork, self._seen = RunDir.of(self._config), fork, seen
        self._evaluations = _Evaluations(self._place, seen)
        self._over = _is_complete(self._config, self._place)

    def step(self) -> dict[str, Any]:
        """Return the evaluation after the last one that Tune has seen: from the record, if it is there already."""
        with self._called():
            while (found := self._next()) is None:
                self._train()
                time.sleep(_LOOK_SECONDS)
            return found

    def _next(self) -> dict[str, Any] | None:
        over = self._is_over()  # before the record is read: then all of it is there
        found = self._evaluations.after(self._seen)
        # That of the last step comes with the end of the run, or Tune might stop its export.
        if found is not None and (over or found[0] != steps_of(self._place.path)):
            self._seen, values = found
            done = over and self._evaluations.after(self._seen) is None
            return {**values, "step": self._seen, "run": str(self._place.path), DONE: done}
        if over and self._seen < 0:
            raise TrainingError(
                f"{self._place.path}: the run is complete and has no evaluation, by which Tune could compare it: name "
                "a dataset in data.eval, and set eval.every"
            )
        return {RESULT_DUPLICATE: True} if over else None  # for Tune the end, with what it has seen

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        with self._called():
            found, digest = self._commit()
            TrialReference(
                trial=self.trial_id, run=self._config.run.name, step=found.step, digest=digest,
                seen=self._seen, given=self._given, fork=self._fork,
            ).write(Path(checkpoint_dir))  # fmt: skip

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue the trial's own run, and fork any other, and its own if its values have changed."""
        if not isinstance(checkpoint, str):
            raise ResumeError(f"a checkpoint of Tune's is a {type(checkpoint).__name__}: it must be one of RunTrial's")
        found = TrialReference.read(Path(checkpoint))
        with self._called():
            self._stop()
            there = RunDir.of(with_run(self._base, name=found.run))
            if found.trial == self.trial_id and found.given == self._given:
                check_reference(found, there)
                self._be(found.run, fork=found.fork, seen=found.seen)
                return
            # The name follows from what is forked, and with which values: the same call again finds the same run.
            which = hash_of([found.run, found.step, found.digest, self._given])[:8]
            fork = {"run": found.run, "step": found.step}
            self._be(f"{self._base.run.name}-{self.trial_id}-{which}", fork=fork, seen=found.seen)
            if not committed(self._place.checkpoints):  # with one of its own a fork no longer needs the other run
                check_reference(found, there, forks=True)

    def cleanup(self) -> None:
        with self._lock:
            self._calls += 1
            self._stop()
            if self._driver is not None:
                self._driver.close()
                self._driver = None

    # The run

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Do what Tune asks for. If it then asks for nothing more for a while, let the run end: it goes on later."""
        with self._lock:
            self._calls += 1
            try:
                yield
            finally:
                rest = threading.Timer(_IDLE_SECONDS, self._rest, [self._calls])
                rest.daemon = True
                rest.start()

    def _rest(self, calls: int) -> None:
        with self._lock:
            if calls == self._calls:
                self._stop()

    def _stop(self) -> None:
        if self._trains and self._driver is not None:
            self._driver.stop(self._seconds)
            end = self._driver.look()
            self._over = end is not None and end.how == "finished"
        self._trains = False

    def _is_over(self) -> bool:
        """Return whether the run is complete. Raises what has ended it before."""
        if self._trains and self._driver is not None and (end := self._driver.look()) is not None:
            self._trains = False
            if end.how != "finished":
                raise end.error()
            self._over = True
        return self._over

    def _train(self) -> None:
        """Let the run go on, unless it does."""
        if self._trains:
            return
        log = self._place.path / LOG
        make_private(log.parent)
        if self._driver is None or not self._driver.alive:
            if self._driver is not None:
                self._driver.close()
            began = Path("/proc/self/environ").read_text(errors="surrogateescape").split("\0")
            context = ray.get_runtime_context() if ray.is_initialized() else None
            env = environment_of_driver(
                dict(each.split("=", 1) for each in began if "=" in each),
                seconds=self._seconds,
                address=None if context is None else context.gcs_address,
                runtime_env={} if context is None else dict(context.runtime_env),
            )
            env[SHARED] = f"{RunDir.of(self._base).path}-*"  # the trials: a run of the base itself is none of them
            self._driver = RunDriver(cwd=self._cwd, env=env, log=log)
        _free(self._place, self._seconds)
        self._driver.train(self._config, log, stop_seconds=self._seconds)
        self._trains = True

    def _commit(self) -> tuple[CommittedCheckpoint, str]:
        """Return a committed checkpoint of the newest evaluation's step, and its digest; if there is none, that of a
        step after it, for which the run is asked."""
        asking, asked = Asking(self._place.path), False
        ask_at = time.monotonic() + (_PLANNED_SECONDS if _is_planned(self._place, self._seen) else 0.0)
        try:
            while True:
                over = self._is_over()
                if (found := self._committed(over)) is not None:
                    return found
                if not over:
                    self._train()
                if not asked and time.monotonic() > ask_at and self._place.path.is_dir():
                    asking.ask()
                    asked = True
                if asked and (answer := asking.answer()) is not None and answer["path"] is None:
                    raise TrainingError(
                        f"{self._place.path}: Tune wants a checkpoint, and that of step {answer['step']} was not "
                        f"written: {answer['problem']}"
                    )
                time.sleep(_LOOK_SECONDS)
        finally:
            asking.leave()

    def _committed(self, over: bool) -> tuple[CommittedCheckpoint, str] | None:
        """Return what a reference may name now; None: nothing yet. `over`: the run is complete."""
        there = committed(self._place.checkpoints)
        step = next((each.step for each in there if each.lasting and each.step >= max(1, self._seen)), None)
        if over and step is None:
            if not there:
                raise TrainingError(
                    f"{self._place.path}: the run is complete, and {self._place.checkpoints} has no checkpoint: "
                    "bring its checkpoints back there (checkpoint.storage), or remove the run to train it again"
                )
            step = there[-1].step
        with suppress(FileNotFoundError):  # pruned just now, so there is a newer one
            if step is not None and (found := checkpoint_at(there, step)) is not None:
                return found, digest_of(found)
        return None


class _Evaluations:
    """What a run has measured, as its record grows."""

    def __init__(self, place: RunDir, seen: int) -> None:
        self._records = [RecordFollower(file, after=seen) for file in (place.metrics, place.evaluations)]
        self._found: dict[int, dict[str, float]] = {}

    def after(self, step: int) -> tuple[int, dict[str, float]] | None:
        """Return the first evaluation after a step."""
        for record in self._records:
            with suppress(OSError):  # storage that does not answer is asked again
                for line in record.lines():
                    if line["kind"] == "eval":
                        self._found[step_of(line)] = {name: float(value) for name, value in line["values"].items()}
        later = min((each for each in self._found if each > step), default=None)
        return None if later is None else (later, self._found[later])


def _is_complete(config: FinetuneConfig, place: RunDir) -> bool:
    """Return whether nothing is left to do of a run: its evaluations and its export are made."""
    events: list[dict[str, Any]] = []
    with suppress(RaytuneError, OSError, ValueError):
        events = [event for event in read_events(place.events) if event["event"] == names.ATTEMPT_ENDED]
    finished = bool(events) and events[-1]["fields"].get("status") == "finished"
    return finished and has_export(config, place)


def _is_planned(place: RunDir, step: int) -> bool:
    """Return whether the plan has a checkpoint after this step, as far as it says so in steps."""
    with suppress(OSError, ValueError, AttributeError):
        every = read_json(place.path / PLAN_FILE, limit=_PLAN_BYTES).get("save_every")
        return is_count(every) and every > 0 and step > 0 and step % every == 0
    return False


def _free(place: RunDir, seconds: float) -> None:
    """Wait until no other command works on the run, after asking it to end: what drove the trial before may still save.

    One that gives no sign of life is left to `finetune`, which knows when to take its run.
    """
    signs, until = Signs(place), time.monotonic() + 2 * seconds
    request: StopRequest | None = None
    try:
        while (state := signs.look()) in ("running", None):
            if state == "running" and request is None:
                request = StopRequest(place.path, signs.owner or "")
                request.ask()
            if time.monotonic() > until:
                raise TrainingError(
                    f"{place.path}: another command still works on the trial's run after {2 * seconds:g} s "
                    f"({holder_of(place)}); stop it, and let Tune try again"
                )
            time.sleep(_LOOK_SECONDS)
    finally:
        if request is not None:
            request.leave()
