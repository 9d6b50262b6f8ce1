"""sweep(spec): a whole sweep in one call, from where its log says that it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from raytune_fsdp.base.durable import make_private, replace_durably
from raytune_fsdp.base.errors import ConfigError, RaytuneError, TrainingError, in_one_line
from raytune_fsdp.base.lease import lease_of, token_of
from raytune_fsdp.checkpoint.on_demand import Requests
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.run_lock import locked
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.plan.run_dir import RunDir, is_run
from raytune_fsdp.tune.best import config_now, put_best
from raytune_fsdp.tune.board import SweepBoard
from raytune_fsdp.tune.history import histories
from raytune_fsdp.tune.log import Entry, SweepBegun, SweepLog, Trial, trials_in, writing
from raytune_fsdp.tune.place import SweepDir, as_run
from raytune_fsdp.tune.running.cluster import ray_for, threads_for
from raytune_fsdp.tune.running.runner import Runner
from raytune_fsdp.tune.running.values import check_begins, measured_in
from raytune_fsdp.tune.schedulers.choose import scheduler_of
from raytune_fsdp.tune.schedulers.protocol import Scheduler
from raytune_fsdp.tune.space import check_skip, check_trials, trials_of
from raytune_fsdp.tune.spec import SweepSpec, sweep_text
from raytune_fsdp.tune.table import Measured, best_of, leaderboard
from raytune_fsdp.tune.tracked import Tracked
from raytune_fsdp.tune.turn import begun_of, check_same, with_metric


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep has come to, be it over or not."""

    log: Sequence[Entry]
    best: Trial
    place: SweepDir


def checked(spec: SweepSpec) -> tuple[list[FinetuneConfig], Scheduler]:
    """Return the configs of the trials that are known before the sweep begins, and its scheduler.

    Raises ConfigError for all that can be found wrong with them.
    """
    check_skip(spec)
    configs = check_trials(spec, trials_of(spec))
    for each in configs:
        if not each.data.eval and (spec.metric is None or not each.eval.tasks):
            raise ConfigError(
                f"data.eval=[] in the base of {each.run.name}: trials are compared by the mean loss over evaluation "
                "data: name some in data.eval, or with eval.tasks a metric of theirs (metric)"
            )
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
    so_far: Callable[[SweepResult], None] = lambda result: None,
    trust_places: bool = False,
    force: bool = False,
) -> SweepResult:
    """Train the trials of a sweep to its end. Raises Interrupted where it is to stop before; the same call goes on.

    To be called in the main thread: the processes of trials end with the thread that has started them. `before` is
    called once nothing is wrong with the sweep, before anything is started; `so_far` where it ends before it is over,
    if a trial was measured. `trust_places`, `force`: as in `finetune`.
    """
    configs, scheduler = checked(spec)
    place, board, first = SweepDir.of(spec), SweepBoard(spec), configs[0]
    run = as_run(spec, first)
    if is_run(place.path):
        raise ConfigError(f"name={spec.name}: {place.path} is a run: give the sweep another name")
    spec.budget.check_until()
    with _locked(run), Signals("before a trial was started; nothing is lost") as signals:
        lease = lease_of(RunDir.of(run).lock)
        log, begun = _begun(spec, place, first, lambda: before(configs, scheduler))
        requests = Requests(place.path, token_of(lease))
        tracked, over = Tracked(spec, first), False
        tracked.begin()

        def stops() -> int:
            return signals.count + requests.stopping()

        try:
            with ray_for(configs, spec.concurrent, begun.threads, place.path) as cluster:
                if cluster.about is not None:
                    board.say(f"Ray for all trials: {cluster.about}")
                signals.hold()  # from here on they are looked at between two looks at the trials
                flags = [*["--trust-places"] * trust_places, *["--force"] * force]
                Runner(
                    spec, scheduler, log,
                    stops=stops, board=board, cluster=cluster, lease=lease, parent=tracked.id, flags=flags,
                ).run()  # fmt: skip
                over = True
        finally:
            rows = leaderboard(log.entries)
            best = best_of(rows)
            try:
                if best is not None:
                    put_best(spec, log.entries, best)
            except (OSError, RaytuneError) as error:  # must not hide what has ended the sweep
                board.say(f"{place.best} could not be written: {in_one_line(error)}; the same command writes it")
            tracked.end(log.entries, best, over=over)
            if best is not None and not over:
                with suppress(OSError, RaytuneError):
                    so_far(SweepResult(log=log.entries, best=best.trial, place=place))
    if best is None:
        what = "every trial has failed" if all(row.state == "failed" for row in rows) else "no trial has a finite value"
        raise TrainingError(f"{spec.name}: {what}: {place.outputs} has what they have said")
    return SweepResult(log=log.entries, best=best.trial, place=place)


@contextmanager
def _locked(run: FinetuneConfig) -> Iterator[None]:
    """Hold the lock of a sweep, which is that of a run in its place. Refuses in the words of a sweep."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(run))
        except ConfigError as error:
            raise ConfigError(*(line.replace("run.name", "name") for line in error.args)) from None
        yield


def _begun(
    spec: SweepSpec, place: SweepDir, first: FinetuneConfig, before: Callable[[], None]
) -> tuple[SweepLog, SweepBegun]:
    """Return the log of a sweep that begins or goes on, and its first entry. Refuse that of another one."""
    with writing(place.path):
        make_private(place.path)
    log = SweepLog(place.log)
    begun = begun_of(spec, first, threads_for(first, spec.concurrent))
    check_same(spec, begun, log.entries)
    if not log.entries:
        check_begins(spec)
    with writing(place.spec):
        replace_durably(place.spec, sweep_text(spec), private=True)
    before()
    if not log.entries:
        log.append([begun])
    elif isinstance(was := log.entries[0], SweepBegun):
        begun = with_metric(was, begun, log.entries)
        if begun != was:
            log.begin_again(begun)
    return log, begun


def measured_by(spec: SweepSpec, log: Sequence[Entry]) -> Measured:
    """Return what the evaluations of all trials have measured, as far as the log has come: runs may have gone on."""
    found = {}
    for number, each in histories(trials_in(log), log).items():
        config = config_now(spec, each.trial, log)
        record = measured_in(config, RunDir.of(config), spec.metric)
        found[number] = {step: values for step, values in record.everything.items() if step <= each.step}
    return found
