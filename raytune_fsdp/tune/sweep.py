"""sweep(spec): a whole sweep in one call, from where its log says that it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raytune_fsdp.base.durable import make_private, replace_durably
from raytune_fsdp.base.errors import ConfigError, TrainingError
from raytune_fsdp.base.lease import lease_of, token_of
from raytune_fsdp.checkpoint.on_demand import Requests
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.run_lock import locked
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.tune.best import put_best
from raytune_fsdp.tune.board import SweepBoard
from raytune_fsdp.tune.log import Entry, SweepLog, Trial, changes_now, generation, trials_in
from raytune_fsdp.tune.place import SweepDir, as_run
from raytune_fsdp.tune.running.cluster import ray_for
from raytune_fsdp.tune.running.runner import Runner
from raytune_fsdp.tune.running.values import measured_in
from raytune_fsdp.tune.schedulers.choose import scheduler_of
from raytune_fsdp.tune.schedulers.protocol import Scheduler
from raytune_fsdp.tune.space import check_trials, config_of, run_name_of, trials_of
from raytune_fsdp.tune.spec import SweepSpec, sweep_text
from raytune_fsdp.tune.table import leaderboard
from raytune_fsdp.tune.tracked import Tracked
from raytune_fsdp.tune.turn import turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep has come to."""

    log: Sequence[Entry]
    best: Trial
    place: SweepDir


def checked(spec: SweepSpec) -> tuple[list[FinetuneConfig], Scheduler]:
    """Return the configs of the trials that are known before the sweep begins, and its scheduler.

    Raises ConfigError for all that can be found wrong with them.
    """
    configs = check_trials(spec, trials_of(spec))
    if (wrong := next((each for each in configs if each.eval.where == "task"), None)) is not None:
        raise ConfigError(
            f"eval.where=task in the base of {wrong.run.name}: trials stop after an evaluation, and a run that stops "
            "does not wait for its tasks: set eval.where=ranks"
        )
    return configs, scheduler_of(spec, configs)


def sweep(
    spec: SweepSpec,
    *,
    before: Callable[[Sequence[FinetuneConfig], Scheduler], None] = lambda configs, scheduler: None,
) -> SweepResult:
    """Train the trials of a sweep to its end. Raises Interrupted where it is to stop before; the same call goes on.

    To be called in the main thread: the processes of trials end with the thread that has started them. `before` is
    called once nothing is wrong with the sweep, before anything is started.
    """
    configs, scheduler = checked(spec)
    place, board, first = SweepDir.of(spec), SweepBoard(spec), configs[0]
    run = as_run(spec, first)
    with locked(run), Signals() as signals:
        signals.hold()  # from here on they are looked at between two looks at the trials
        make_private(place.path)
        log = SweepLog(place.log)
        turn(spec, scheduler, log.entries, ())  # refused, if it is the log of another sweep
        replace_durably(place.spec, sweep_text(spec), private=True)
        before(configs, scheduler)
        requests = Requests(place.path, token_of(lease_of(RunDir.of(run).lock)))
        tracked, over = Tracked(spec, first), False
        tracked.begin()

        def stops() -> int:
            return signals.count + requests.stopping()

        try:
            with ray_for(first, spec.concurrent) as cluster:
                if cluster.about is not None:
                    board.say(f"Ray for all trials: {cluster.about}")
                Runner(spec, scheduler, log, stops=stops, board=board, cluster=cluster, parent=tracked.id).run()
                over = True
        finally:
            best = put_best(spec, log.entries)
            row = next((row for row in leaderboard(log.entries) if best is not None and row.trial == best), None)
            name = None if best is None else run_name_of(spec, best, generation(best.number, log.entries))
            tracked.end(log.entries, name, None if row is None else row.value, over=over)
    if best is None:
        raise TrainingError(f"no trial of {spec.name} was measured: {place.outputs} has what they have said")
    return SweepResult(log=log.entries, best=best, place=place)


def last_measured(spec: SweepSpec, log: Sequence[Entry]) -> Mapping[int, Mapping[str, float]]:
    """Return what the last evaluation of each trial has measured, of those that came as far as the best."""
    found: dict[int, tuple[int, Mapping[str, float]]] = {}
    for trial in trials_in(log):
        config = config_of(spec, trial, changes_now(trial, log), generation(trial.number, log))
        measured = measured_in(RunDir.of(config), spec.metric).everything
        if measured:
            found[trial.number] = max(measured), measured[max(measured)]
    rows = [row for row in leaderboard(log) if row.trial.number in found]
    last = found[rows[0].trial.number][0] if rows else 0
    return {trial: values for trial, (step, values) in found.items() if step == last}
