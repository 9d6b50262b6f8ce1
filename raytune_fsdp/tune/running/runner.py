"""Train the trials of a sweep: what may run now is started, what has ended is looked at, and the log says what is next.

Every trial trains in a process of its own, by the command that a person would give. This one may be killed at any
moment: what trials have measured is in their records, what was decided is on the log, and the next command reads both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raytune_fsdp.base.errors import ConfigError, Interrupted, TrainingError, in_one_line
from raytune_fsdp.base.lease import Lease
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.run_lock import Signs, holder_of
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.tune.board import SweepBoard
from raytune_fsdp.tune.log import SweepLog, Trial, TrialEnded, Value, generation, trials_in
from raytune_fsdp.tune.place import SweepDir
from raytune_fsdp.tune.running.children import Child
from raytune_fsdp.tune.running.cluster import TrialsRay, without_ray
from raytune_fsdp.tune.running.times import TrialTimes, ranks_of
from raytune_fsdp.tune.running.values import TrialRecord, check_own, measured_in
from raytune_fsdp.tune.schedulers.protocol import Found, Scheduler, Stretch
from raytune_fsdp.tune.space import config_of, run_name_of
from raytune_fsdp.tune.spec import SweepSpec
from raytune_fsdp.tune.turn import turn

_LOOK_SECONDS, _READ_SECONDS = 0.1, 1.0
"""How often processes are looked at, and the records of those that run."""
_TRIES = 3
"""Failures of a trial without a checkpoint in between after which the sweep stops. If training itself has failed in two
in a row, they are the trial's own."""
_AGAIN_SECONDS = (2.0, 60.0)
"""How long a trial waits before it is tried again, after the first failure and after the second: what failed besides
training, such as the head of a cluster, may come back meanwhile."""
_REFUSED, _REPEATED, _INTERRUPTED = 2, 3, 130
_WORKED_ON = "another command works on"
_STOP_SECONDS = 600.0


@dataclass(slots=True, kw_only=True)
class TrialRun:
    """The newest run of a trial, as far as this command knows it."""

    name: str
    config: FinetuneConfig
    place: RunDir
    generation: int
    begins: int
    """The step of the fork that it is; 0 if it is none."""
    signs: Signs
    measured: TrialRecord = field(default_factory=TrialRecord)
    ended: TrialEnded | None = None
    child: Child | None = None
    trains_since: float | None = None
    """When the ranks of its process were first seen, or, without Ray, when it was started; None: it waits for room, or
    prepares."""
    until: int | None = None
    """Where its process stops; None: at the run's end."""
    attempt: int = 0
    """The newest attempt on record before its process was started."""
    no_room: int = 0
    """How often it had found no room on Ray before that."""
    failures: int = 0
    failed_at: int = -1
    again_at: float = 0.0
    """Before this moment it is not started again."""
    own: str = ""
    """By what its last failure is known again, if that was training's own (`_said_by_training`)."""
    waits: bool = False
    """Whether another command works on it, or may do so."""
    said: bool = False
    """Whether that was said."""
    said_no_room: bool = False

    @property
    def seconds(self) -> float:
        """How long its ranks have been there."""
        return 0.0 if self.trains_since is None else time.monotonic() - self.trains_since


class Runner:
    """Runs one sweep to its end."""

    def __init__(
        self,
        spec: SweepSpec,
        scheduler: Scheduler,
        log: SweepLog,
        *,
        stops: Callable[[], int],
        board: SweepBoard,
        cluster: TrialsRay,
        lease: Lease | None,
        parent: str | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """`stops`: how often somebody has asked the sweep to stop. `cluster`: the Ray of its trials. `lease`: of this
        command on the sweep. `parent`: the id of the sweep's MLflow run. `flags`: of each trial's command."""
        self._spec = spec
        self._scheduler = scheduler
        self._stops = stops
        self._board = board
        self._cluster = cluster
        self._lease = lease
        self._parent = parent
        self._flags = flags
        self._place = SweepDir.of(spec)
        self.log = log
        self._runs: dict[int, TrialRun] = {}
        self._found: list[Found] = []
        """What the records of the newest runs hold, in the order in which it was found."""
        self._news = 0
        """How much was ever found."""
        self._refused: set[tuple[int, int]] = set()
        """Trials, with their generations, whose changes make no config."""
        self._times = TrialTimes(self._place)
        self._read_at = 0.0

    def run(self) -> None:
        """Train until the sweep is over. Raises Interrupted if it is to stop before."""
        try:
            while True:
                now = turn(self._spec, self._scheduler, self.log.entries, self._found)
                if now.entries:
                    self._check_lease()
                    self.log.append(now.entries)
                    self._board.decided(self.log.entries, now.entries, table=not now.over)
                if now.over:
                    return
                if self._begin(now.stretches):
                    continue  # a record says more than the log
                if not any(run.child is not None or run.waits for run in self._runs.values()):
                    done = ", ".join(
                        f"{self._runs[each.trial].name} to {each.until}"
                        for each in now.stretches
                        if each.trial in self._runs
                    )
                    raise TrainingError(f"the sweep stands still: nothing follows from what is trained ({done})")
                self._board.show(self._runs.values())
                self._wait()
        finally:
            self._end_all()

    # --- What may run ------------------------------------------------------------------------------------------------

    def _begin(self, stretches: Sequence[Stretch]) -> bool:
        """Start what may run and does not. Return whether anything was found instead, in the record of a run."""
        before, trials = self._news, {trial.number: trial for trial in trials_in(self.log.entries)}
        found = {each.trial: self._run_of(each, trials[each.trial]) for each in stretches}
        runs = {number: run for number, run in found.items() if run is not None}
        for number, run in runs.items():
            # By the trial's name, which stands for all of its runs, or by that of a fork.
            if {run_name_of(self._spec, trials[number]), run.name} & {*self._spec.skip} and run.child is None:
                self._over(number, run, "it was left out (skip)")
        stretches = [each for each in stretches if each.trial in runs]
        # Until a fork has begun, its source stays where it is: it could remove the checkpoint.
        sources = {each.fork[0] for each in stretches if each.fork and _is_to_begin(runs[each.trial], each)}
        for number, run in self._runs.items():
            if run.child is not None and number not in runs and not run.child.asked:
                run.child.stop()
        spent = self._spent()
        for stretch in stretches:
            run, busy = runs[stretch.trial], [each for each in self._runs.values() if each.child is not None]
            if run.child is not None or run.ended is not None or run.measured.has(stretch.until):
                continue
            if stretch.trial in sources or run.generation != stretch.generation:
                continue
            # The first one prepares the data, which the others then find.
            alone = busy and not any(each.measured.began for each in self._runs.values())
            if len(busy) >= self._spec.concurrent or alone or spent:
                continue
            if self._is_free(run):
                self._start(run, stretch)
        if spent and not any(run.child is not None for run in self._runs.values()) and self._news == before:
            raise Interrupted(f"{spent}; with a larger budget the same command goes on")
        return self._news > before

    def _run_of(self, stretch: Stretch, trial: Trial) -> TrialRun | None:
        """Return the run of a trial in which this stretch is trained; None: what was proposed or drawn for it makes no
        config, which is how its trial ends."""
        known, key = self._runs.get(trial.number), (trial.number, stretch.generation)
        if known is not None and (known.generation == stretch.generation or known.child is not None):
            return known  # also the run before a fork, whose process has measured all and is about to end
        if key in self._refused:
            return None
        self._found = [each for each in self._found if each.trial != trial.number]
        begins = stretch.fork[1] if stretch.fork else 0
        try:
            config = config_of(self._spec, trial, stretch.changes, stretch.generation)
        except ConfigError as error:
            self._refused.add(key)
            self._found.append(TrialEnded(trial.number, begins, in_one_line(error)))
            self._news += 1
            return None
        place = RunDir.of(config)
        run = TrialRun(
            name=config.run.name, config=config, place=place, generation=stretch.generation,
            begins=begins, signs=Signs(place),
        )  # fmt: skip
        check_own(run.config, place)
        self._runs[trial.number] = run
        self._read(trial.number, run)
        return run

    def _is_free(self, run: TrialRun) -> bool:
        """Return whether a run may be started: no other command works on it (that of a sweep that was killed ends
        within seconds), and it has not failed just now."""
        if time.monotonic() < run.again_at:
            run.waits = True
            return False
        seen = run.signs.look()
        run.waits = seen not in ("free", "silent")
        if seen == "running" and not run.said:
            run.said = True
            self._board.say(f"{run.name} waits: {holder_of(run.place) or 'another command'} works on it")
        return not run.waits

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _start(self, run: TrialRun, stretch: Stretch) -> None:
        self._check_lease()
        changed: dict[str, object] = {"stop_after": stretch.until}
        if stretch.fork is not None:
            source, step = stretch.fork
            of = next(trial for trial in trials_in(self.log.entries) if trial.number == source)
            name = run_name_of(self._spec, of, generation(source, self.log.entries, step))
            changed["fork"] = {"run": name, "step": step}
        tree = run.config.model_dump(exclude_unset=True)  # some defaults give way to what suits a run
        tree.setdefault("tracking", {}).setdefault("mlflow", {})["parent"] = self._parent
        config = FinetuneConfig.model_validate({**tree, "run": {**tree["run"], **changed}})
        output = self._place.output(run.name)
        run.until, run.said = stretch.until, False
        run.trains_since = time.monotonic() if without_ray(config) else None
        run.attempt, run.no_room = run.measured.attempt, run.measured.no_room
        try:
            output.parent.mkdir(exist_ok=True)
            run.child = Child(config, output, self._cluster.variables, self._flags)
        except OSError as error:  # such as a full disk, under the sweep or under /tmp
            raise TrainingError(
                f"{run.name} cannot be started: {in_one_line(error)}; mend that, and the same command goes on"
            ) from error
        self._cluster.used_by(run.child.pid)
        self._times.started(stretch.trial, run.name, stretch.until)
        self._board.started(run.name, stretch.until)

    # --- What becomes of it ------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until a process has ended, or a record has more in it."""
        before, began = self._news, time.monotonic()
        while True:
            if self._stops():
                raise Interrupted("the sweep was stopped; the same command goes on")
            self._spec.budget.check_until()
            ended = False
            for number, run in list(self._runs.items()):
                if run.child is not None and (code := run.child.code()) is not None:
                    self._ended(number, run, code)
                    ended = True
            if time.monotonic() - self._read_at > _READ_SECONDS:
                self._read_at = time.monotonic()
                for number, run in self._runs.items():
                    if run.child is not None:
                        began_before = run.measured.began
                        self._read(number, run)
                        ended |= run.measured.began and not began_before
                self._board.show(self._runs.values())
            waiting = any(run.waits for run in self._runs.values()) or not any(run.child for run in self._runs.values())
            if ended or self._news > before or (waiting and time.monotonic() - began > _READ_SECONDS):
                return
            time.sleep(_LOOK_SECONDS)

    def _read(self, number: int, run: TrialRun) -> None:
        """Read what the record of a run says, and note what is new."""
        known = {each.step for each in self._found if isinstance(each, Value) and each.trial == number}
        run.measured, metric = measured_in(run.config, run.place, self._spec.metric), self._spec.metric
        newest = max(run.measured.attempt, run.measured.joined)
        if run.child is not None and run.trains_since is None and newest > run.attempt:
            run.trains_since = time.monotonic()
            self._times.trains(run.name)
        measured = {name for values in run.measured.everything.values() for name in values}
        if metric is not None and measured and metric not in measured:
            raise ConfigError(
                f"metric={metric}: the evaluations of {run.name} have no such value: set it to one that they have: "
                f"{', '.join(sorted(measured))}"
            )
        new = [Value(number, step, value) for step, value in run.measured.values.items() if step not in known]
        self._found += new
        self._news += len(new)
        if run.measured.over and run.child is None:
            self._over(number, run)

    def _over(self, number: int, run: TrialRun, error: str | None = None) -> None:
        if run.ended is None:
            # Of a failure not that of a checkpoint: a stop in between makes some, and the log must not depend on it.
            last = run.begins if error else max(run.measured.committed, run.begins)
            run.ended = TrialEnded(number, max(run.measured.values, default=last), error)
            self._found.append(run.ended)
            self._news += 1

    def _ended(self, number: int, run: TrialRun, code: int) -> None:
        """Look at what a process has left that has ended with this code."""
        child, run.child = run.child, None
        assert child is not None
        self._read(number, run)
        self._times.ended(number, run.name, code, run.seconds)
        if code == 0:
            self._over(number, run)
        elif run.measured.has(run.until) or child.asked:
            pass
        elif code == _INTERRUPTED and run.measured.unlisted:
            # It may have come to its rung: nobody need have stopped it.
            self._failed(number, run, code, f"its checkpoints cannot be listed: {run.measured.unlisted}")
        elif code == _INTERRUPTED:
            raise Interrupted(f"{run.name} was stopped by somebody else, so the sweep stops; the same command goes on")
        else:
            self._failed(number, run, code, child.error())

    def _failed(self, number: int, run: TrialRun, code: int, error: str) -> None:
        """Decide what becomes of a trial whose process has failed.

        On the log is only what its own training has said: then it has failed for good. What else goes wrong, be it a
        node that is missing or a disk that is full, would be found as the trial's fault by every later command.
        """
        if code == _REFUSED and _WORKED_ON in error:
            return  # it is waited for
        if run.measured.no_room > run.no_room:  # others have it, and nothing is wrong with the trial
            if not run.said_no_room:
                self._board.say(f"{run.name} waits for room: {error}")
            run.said_no_room, run.again_at = True, time.monotonic() + _AGAIN_SECONDS[0]
            return
        way_out = f"mend that, and the same command goes on; if the fault is this trial's alone: skip=[{run.name}]"
        if code == _REFUSED:
            raise ConfigError(f"{run.name} is refused, so the sweep stops: {error}; {way_out}")
        run.failures = run.failures + 1 if run.measured.committed == run.failed_at else 1
        own, words = _said_by_training(run, code)
        again = run.failures > 1 and own != "" and own == run.own
        run.failed_at, run.own = run.measured.committed, own
        if again:
            self._board.failed(run.name, error, again=False)
            storage = str(run.place.path.parent)
            self._over(number, run, " ".join(words.replace(f"{storage}/", "").split()))
        elif run.failures >= _TRIES:
            raise TrainingError(f"{run.name} has failed {_TRIES} times, so the sweep stops: {error}; {way_out}")
        else:
            self._board.failed(run.name, error, again=True)
            run.again_at = time.monotonic() + _AGAIN_SECONDS[run.failures - 1]

    def _spent(self) -> str:
        """Say that the budget is used up, if it is."""
        most = self._spec.budget.gpu_hours
        if most is None:
            return ""
        running = [run for run in self._runs.values() if run.child is not None]
        used = self._times.hours
        used += sum(run.seconds * ranks_of(run.place.path) for run in running) / 3600
        return f"budget.gpu_hours={most:g} is used up ({used:.2f})" if used >= most else ""

    def _end_all(self) -> None:
        """Let all processes commit and end, and wait for them; at another wish to stop, end them at once."""
        stopping = [(number, run, run.child) for number, run in self._runs.items() if run.child is not None]
        running = [child for *_, child in stopping]
        for child in running:
            if not child.asked:  # one that commits must not be ended
                child.stop()
        if many := len(running):
            commit = "trial commits" if many == 1 else "trials commit"
            self._board.say(f"stopping: {many} {commit} a checkpoint (again to stop at once)")
        asked, deadline = self._stops(), time.monotonic() + _STOP_SECONDS
        while running := [child for child in running if child.code() is None]:
            if self._stops() > asked or time.monotonic() > deadline:
                for child in running:
                    child.kill()
            time.sleep(_LOOK_SECONDS)
        for number, run, child in stopping:
            self._times.ended(number, run.name, child.code(), run.seconds)


def _is_to_begin(run: TrialRun, stretch: Stretch) -> bool:
    """Return whether what trains a stretch has not begun yet. `run`: the trial's newest, whose process may not have
    ended where a fork is to follow it."""
    return run.generation != stretch.generation or not (run.measured.began or run.ended)


def _said_by_training(run: TrialRun, code: int) -> tuple[str, str]:
    """Return by what a failure is known again as one of training itself, and its words; empty if it is none.

    What a rank says of its own training is so in any words: those about a GPU's memory have numbers that differ. A run
    that gives up after three equal failures (exit code 3) may have hung, or been ended for the memory of its node: its
    cause must come again.
    """
    if run.measured.attempt <= run.attempt:
        return "", ""
    if run.measured.failure:
        return names.TRAINING_FAILED, run.measured.failure
    return (run.measured.gave_up, run.measured.gave_up) if code == _REPEATED else ("", "")
