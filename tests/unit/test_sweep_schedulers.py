"""What a sweep decides follows from its log: whoever is first, whatever is killed, wherever the log is cut."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune_fsdp.base.errors import ConfigError, ResumeError
from raytune_fsdp.config.load import load_config
from raytune_fsdp.config.text import dump
from raytune_fsdp.tune.log import Decision, Draw, Entry, SweepBegun, Trial, TrialEnded, Value, changes_now, trials_in
from raytune_fsdp.tune.schedulers.asha import Asha
from raytune_fsdp.tune.schedulers.choose import scheduler_of
from raytune_fsdp.tune.schedulers.median import Median
from raytune_fsdp.tune.schedulers.pbt import Pbt
from raytune_fsdp.tune.schedulers.protocol import Scheduler
from raytune_fsdp.tune.schedulers.rungs import Rungs
from raytune_fsdp.tune.space import ADDED_LATER, check_trials, trials_of
from raytune_fsdp.tune.spec import PbtScheduler, SweepSpec, Values
from raytune_fsdp.tune.table import best_of, leaderboard
from raytune_fsdp.tune.turn import begun_of, check_same
from tests.sweeps import BASE, LAST, World, check_follows, load_base, make_sweep, play

ALL: dict[str, dict[str, Any]] = {
    "rungs": {"eta": 2},
    "asha": {"eta": 2},
    "median": {"others": 2},
    "pbt": {"every": 20},
    "none": {},
}
SAME_LOG = ("rungs", "pbt", "none")
"""Those whose log is the same whoever is first."""
kinds = st.sampled_from(list(ALL))


def world_of(kind: str, trials: int, buckets: int = 1000, fails: dict[int, int] | None = None, **more: Any) -> World:
    spec = make_sweep(trials, scheduler={"type": kind, **ALL[kind]}, **more)
    return World(spec, buckets=buckets, fails=fails)


worlds = {
    "trials": st.integers(1, 9),
    "concurrent": st.integers(1, 4),
    "buckets": st.sampled_from([3, 40, 1000]),
    "fails": st.dictionaries(st.integers(0, 8), st.sampled_from([10, 20, 30]), max_size=4),
    "best_is": st.sampled_from(["lowest", "highest"]),
}


@given(kind=st.sampled_from(SAME_LOG), seeds=st.sampled_from([1, 3]), chance=st.integers(0, 2**32), **worlds)
@settings(max_examples=60, deadline=None)
def test_the_log_is_the_same_whatever_is_killed(kind: str, seeds: int, chance: int, **world: Any) -> None:
    seeds = 1 if kind == "pbt" else seeds
    log = play(world_of(kind, seeds=seeds, **world), chance=random.Random(chance))
    assert log == play(world_of(kind, seeds=seeds, **{**world, "concurrent": 1}), chance=Undisturbed())


class Undisturbed(random.Random):
    """Nothing is killed, and the first that may run runs."""

    def random(self) -> float:
        return 1.0

    def choice(self, seq: Any) -> Any:
        return seq[0]


@given(kind=kinds, chance=st.integers(0, 2**32), cut=st.floats(0, 1), **worlds)
@settings(max_examples=80, deadline=None)
def test_a_log_that_is_cut_anywhere_goes_on_to_the_same_end(kind: str, chance: int, cut: float, **world: Any) -> None:
    there = world_of(kind, **world)
    log = play(there, chance=NoKills(chance))
    assert play(there, log[: int(cut * len(log))], Undisturbed()) == log


class NoKills(random.Random):
    def random(self) -> float:
        return max(0.2, super().random())


@given(kind=kinds, chance=st.integers(0, 2**32), **worlds)
@settings(max_examples=80, deadline=None)
def test_a_log_played_back_gives_its_own_decisions(kind: str, chance: int, **world: Any) -> None:
    there = world_of(kind, **world)
    log = play(there, chance=random.Random(chance))
    check_follows(there.scheduler, log, world["trials"])


@given(kind=kinds, chance=st.integers(0, 2**32), **worlds)
@settings(max_examples=60, deadline=None)
def test_a_sweep_ends_with_a_trial_that_came_to_its_end(kind: str, chance: int, **world: Any) -> None:
    there = world_of(kind, **{**world, "buckets": 1000})
    log = play(there, chance=random.Random(chance))
    ended = {entry.trial: entry for entry in log if isinstance(entry, TrialEnded)}
    complete = {number for number, entry in ended.items() if entry.error is None}
    assert all(ended[number].step == LAST for number in complete)
    best = best_of(leaderboard(log))
    if set(range(world["trials"])) - set(world["fails"]):
        assert best is not None and best.trial.number not in ended.keys() - complete
        assert best.trial.number in complete or not complete
        assert complete or kind == "rungs", "only where the last one fails after all others were stopped"
    if not world["fails"]:
        assert complete
    values = [entry for entry in log if isinstance(entry, Value)]
    assert len({(each.trial, each.step) for each in values}) == len(values)


# By the book.

TRIALS = [Trial(number, {}, number) for number in range(6)]


def log_of(*entries: Entry, trials: Sequence[Trial] = TRIALS) -> list[Entry]:
    return [SweepBegun({}, {}, False), *trials, *entries]


def at(step: int, *values: float, first: int = 0) -> list[Value]:
    return [Value(first + number, step, value) for number, value in enumerate(values)]


def decided(scheduler: Scheduler, log: Sequence[Entry]) -> list[Entry]:
    return list(scheduler.next(trials_in(log), log).entries)


def runs(scheduler: Scheduler, log: Sequence[Entry]) -> list[tuple[int, int | None]]:
    return [(each.trial, each.until) for each in scheduler.next(trials_in(log), log).stretches]


def test_rungs_by_the_book() -> None:
    rungs = Rungs([10, 20], eta=2, highest=False)
    log = log_of()
    assert runs(rungs, log) == [(number, 10) for number in range(6)]
    found = at(10, 5, 3, 4, math.nan, 3, 9)
    assert rungs.taken(TRIALS, log, found[:5]) == []
    assert rungs.taken(TRIALS, log, found[::-1]) == found
    log += found
    assert decided(rungs, log) == [Decision(10, on=(1, 2, 4), stop=(0, 3, 5))]
    log += decided(rungs, log)
    assert runs(rungs, log) == [(1, 20), (2, 20), (4, 20)]
    # One has ended early, with its last value; one has failed. Of equal ones the first goes on.
    found = [Value(4, 15, 2), TrialEnded(4, 15), TrialEnded(2, 17, "broken"), Value(1, 20, 2)]
    assert rungs.taken(TRIALS, log, found) == [found[3], found[2], *found[:2]]
    log += rungs.taken(TRIALS, log, found)
    assert decided(rungs, log) == [Decision(20, on=(1,), stop=(2, 4))]
    log += decided(rungs, log)
    assert runs(rungs, log) == [(1, None)]
    log += [Value(1, 30, 1), TrialEnded(1, 30)]
    assert rungs.next(TRIALS, log).over


def test_who_was_left_out_at_a_rung_wins_no_place() -> None:
    """The best value of all is there, and the user has said `skip`."""
    end = TrialEnded(1, 10, "it was left out (skip)")
    found = [Value(0, 10, 5), Value(1, 10, 1), end, *at(10, 6, 7, 8, 9, first=2)]
    log = log_of()
    rungs = Rungs([10, 20], eta=2, highest=False)
    assert rungs.taken(TRIALS, log, found) == [each for each in found if each != Value(1, 10, 1)]
    log += rungs.taken(TRIALS, log, found)
    assert decided(rungs, log) == [Decision(10, on=(0, 2, 3), stop=(1, 4, 5))]
    assert rungs.taken(TRIALS, log_of(Value(1, 10, 1)), found)[1] == end  # of a log that a crash has cut
    # What it measured before stays; one that came further had a place when it failed.
    two = log_of(trials=TRIALS[:2])
    further = [Value(1, 10, 1), Value(1, 20, 1), TrialEnded(1, 20, "broken")]
    later = Rungs([20], eta=2, highest=False).taken(TRIALS[:2], two, [Value(0, 20, 3), *further])
    assert later == [Value(0, 20, 3), further[0], further[2]]
    assert rungs.taken(TRIALS[:2], two, [Value(0, 10, 3), *further]) == [Value(0, 10, 3), further[0]]

    asha = Asha([10, 20], eta=2, highest=False)
    assert asha.taken(TRIALS, log_of(*at(10, 5)), found) == [end]
    log = log_of(*at(10, 5), end)
    assert decided(asha, log) == [Decision(10, on=(0,), stop=())]
    assert asha.taken(TRIALS, log_of(), further) == further[:1]

    found = [*at(10, 4, 1), TrialEnded(1, 10, "broken"), *at(10, 3, 2, first=2)]
    log = log_of(trials=MEMBERS) + list(pbt().taken(MEMBERS, log_of(trials=MEMBERS), found))
    (decision,) = decided(pbt(), log)
    assert decision == Decision(10, on=(0, 2, 3), stop=(1,))


def test_one_alone_trains_to_its_end() -> None:
    log = log_of(*at(10, 5, 3, 4, 2, 3, 9))
    rungs = Rungs([10, 20, 40], eta=4, highest=False)
    assert runs(rungs, log + decided(rungs, log)) == [(3, None)]


def test_rungs_compare_the_means_of_seeds() -> None:
    trials = [Trial(2 * variant + seed, {}, variant, seed) for variant in range(3) for seed in range(2)]
    log = log_of(*at(10, 1, 9, 4, 4, 6, 3), trials=trials)
    assert decided(Rungs([10], eta=2, highest=False), log) == [Decision(10, on=(2, 3), stop=(0, 1, 4, 5))]
    assert decided(Rungs([10], eta=2, highest=True), log) == [Decision(10, on=(0, 1), stop=(2, 3, 4, 5))]


def test_rungs_without_anything_to_compare_end() -> None:
    log = log_of(*[TrialEnded(number, 5, "broken") for number in range(6)])
    rungs = Rungs([10], eta=2, highest=False)
    assert decided(rungs, log) == [Decision(10, on=(), stop=tuple(range(6)))]
    assert rungs.next(TRIALS, log + decided(rungs, log)).over
    assert best_of(leaderboard(log + decided(rungs, log))) is None


def test_asha_by_the_book() -> None:
    asha = Asha([10, 20], eta=2, highest=False)
    log = log_of(Value(0, 10, 5))
    assert runs(asha, log) == [(number, 10) for number in range(1, 6)]  # one alone is not the better half
    log += [Value(3, 10, 6)]
    assert decided(asha, log) == [Decision(10, on=(0,), stop=())]
    log += decided(asha, log)
    assert runs(asha, log) == [(0, 20), (1, 10), (2, 10), (4, 10), (5, 10)]  # what came further is first
    assert asha.taken(TRIALS, log, [Value(3, 10, 6), Value(2, 10, 7), Value(0, 10, 5)]) == [Value(2, 10, 7)]
    log += [Value(2, 10, 7), Value(1, 10, 1)]
    assert decided(asha, log) == [Decision(10, on=(1,), stop=())]
    log += [*decided(asha, log), TrialEnded(0, 12, "broken"), Value(1, 20, 1)]
    # Who has failed has come to its rung, as the last.
    assert decided(asha, log) == [Decision(20, on=(1,), stop=())]
    assert runs(asha, log + decided(asha, log)) == [(1, None), (4, 10), (5, 10)]


def test_asha_when_several_may_go_on() -> None:
    asha = Asha([10, 20], eta=2, highest=False)
    both = [Decision(10, on=(number,), stop=()) for number in (0, 1)]
    log = log_of(*at(10, 1, 2, 3, 4), *both, *at(20, 1, 2), *at(10, 2, 5, first=4))
    assert decided(asha, log) == [Decision(20, on=(0,), stop=())]  # whoever came further first
    assert decided(asha, log + decided(asha, log)) == [Decision(10, on=(4,), stop=())]
    # What a trial had before it failed does not count.
    failed = log_of(*at(10, 1, 2, 3, 4), *both, TrialEnded(0, 15, "broken"), Value(1, 20, 9))
    assert decided(asha, failed) == [Decision(20, on=(1,), stop=())]
    # One that waits at its rung has come there, whatever is found of it later.
    assert asha.taken(TRIALS, log_of(Value(0, 10, 1)), [TrialEnded(0, 10), Value(0, 20, 1)]) == []


def test_the_median_by_the_book() -> None:
    rule = Median(grace=10, others=2, highest=False, last=40)
    log = log_of(*at(10, 1, 1, 9), *at(20, 1, 2), trials=TRIALS[:3])
    assert decided(rule, log) == []  # one other alone
    log += [Value(2, 20, 1.2)]  # the others had 1 and 1.5 on average
    assert decided(rule, log) == []
    log[-1] = Value(2, 20, 1.3)
    assert decided(rule, log) == [Decision(20, on=(), stop=(2,))]
    log += decided(rule, log)
    assert decided(rule, log) == [] and runs(rule, log) == [(0, None), (1, None)]
    # Its best value counts, not its newest; nobody stops at the last step, or within the grace.
    assert decided(rule, log_of(*at(10, 1, 1, 0.5), *at(20, 1, 2, 9), trials=TRIALS[:3])) == []
    assert decided(rule, log_of(*at(40, 1, 1, 9), trials=TRIALS[:3])) == []
    assert decided(rule, log_of(*at(10, 1, 1, 9), trials=TRIALS[:3])) == []


def pbt(**more: Any) -> Pbt:
    space = {"optim.lr": Values("loguniform", (1e-5, 1e-2)), "train.z_loss": Values("choice", (0.0, 1e-4, 1e-3))}
    return Pbt(PbtScheduler(type="pbt", every=10, **more), space, False, 40)


MEMBERS = [Trial(number, {"optim.lr": 1e-3, "train.z_loss": 1e-4}, number) for number in range(4)]


def test_pbt_by_the_book() -> None:
    log = log_of(*at(10, 4, 1, 3, 2), trials=MEMBERS)
    log += decided(pbt(), log)
    assert log[-1] == Decision(10, on=(1, 2, 3), stop=(0,))
    (draw,) = decided(pbt(), log)
    assert isinstance(draw, Draw) and (draw.trial, draw.step, draw.source) == (0, 10, 1)
    assert draw.changes["optim.lr"] in (8e-4, 1.25e-3) and draw.changes["train.z_loss"] in (0.0, 1e-3)
    log.append(draw)
    first, *others = pbt().next(MEMBERS, log).stretches
    assert (first.trial, first.until, first.fork, first.generation) == (0, 20, (1, 10), 1)
    assert first.changes == draw.changes == changes_now(MEMBERS[0], log)
    assert [(each.trial, each.fork, each.generation) for each in others] == [(1, None, 0), (2, None, 0), (3, None, 0)]
    assert changes_now(MEMBERS[0], log, step=10) == MEMBERS[0].changes
    # A fork of a fork has what that one has. A member that has failed goes on as a fork, too.
    log += [*at(20, 1, 5, 5), TrialEnded(3, 12, "broken")]
    log += decided(pbt(), log)
    assert log[-1] == Decision(20, on=(0, 1, 2), stop=(3,))
    (again,) = decided(pbt(change=["train.z_loss"]), log)
    assert isinstance(again, Draw) and again.source == 0
    assert again.changes["optim.lr"] == draw.changes["optim.lr"] and again.changes != draw.changes


@pytest.mark.parametrize(("own", "drawn"), [(40, 32), (31, 31), (30, 40)])
def test_pbt_draws_no_length_at_which_a_fork_would_train_nothing(own: int, drawn: int) -> None:
    """It is refused, and the sweep would stop there. Lengths that a fork can have are drawn as ever."""
    rule = PbtScheduler(type="pbt", every=10, factors=[0.8])
    shrinks = Pbt(rule, {"train.max_steps": Values("int", (20, 40))}, False, 40)
    members = [Trial(number, {"train.max_steps": own}, number) for number in range(4)]
    before = [*at(10, 4, 1, 3, 2), Decision(10, (0, 1, 2, 3), ()), *at(20, 4, 1, 3, 2), Decision(20, (0, 1, 2, 3), ())]
    (decision,) = decided(shrinks, log := log_of(*before, *at(30, 4, 1, 3, 2), trials=members))
    (draw,) = decided(shrinks, [*log, decision])
    assert draw == Draw(0, 30, 1, {"train.max_steps": drawn})


@given(value=st.floats(1e-5, 1e-2), key=st.integers(0, 2**64 - 1))
def test_what_pbt_draws_is_in_the_space(value: float, key: int) -> None:
    rule = pbt(factors=[0.5, 2.0])
    assert 1e-5 <= rule._changed(value, Values("loguniform", (1e-5, 1e-2)), key) <= 1e-2
    whole = rule._changed(int(value * 1000), Values("int", (0, 10)), key)
    assert type(whole) is int and 0 <= whole <= 10
    assert rule._changed("b", Values("grid", ("a", "b", "c")), key) in ("a", "c")
    assert rule._changed("a", Values("grid", ("a", "b", "c")), key) in ("a", "b")


def test_pbt_replaces_all_that_have_failed() -> None:
    log = log_of(*at(10, 4, 1), TrialEnded(2, 5, "broken"), TrialEnded(3, 5, "broken"), trials=MEMBERS)
    assert decided(pbt(), log) == [Decision(10, on=(0, 1), stop=(2, 3))]


def test_pbt_ends_where_no_member_is_left() -> None:
    log = log_of(*[TrialEnded(number, 5, "broken") for number in range(4)], trials=MEMBERS)
    assert pbt().next(MEMBERS, log).over


# Which steps a sweep's schedulers compare at.


def steps_of(kind: str, trials: int, base: dict[str, Any] | None = None, **more: Any) -> Any:
    spec = make_sweep(trials, scheduler={"type": kind, **more})
    config = load_config({**BASE, **(base or {})})
    return scheduler_of(spec, [config] * trials)


@pytest.mark.parametrize(
    ("kind", "trials", "rule", "steps"),
    [
        ("rungs", 8, {}, [10, 20, 40]),
        ("rungs", 9, {"eta": 3}, [10, 30]),
        ("rungs", 7, {"eta": 3}, [10, 30]),  # 7, 2, 1
        ("asha", 7, {"eta": 3}, [10]),  # 7, 2, none
        ("asha", 2, {"eta": 3}, []),
        ("rungs", 64, {"first": 30}, [30, 60]),  # the others would be at the end, or beyond it
        ("rungs", 1, {}, []),
    ],
)
def test_rungs_are_where_something_is_left_to_compare(kind: str, trials: int, rule: Any, steps: list[int]) -> None:
    assert steps_of(kind, trials, **rule).steps == steps


@pytest.mark.parametrize(
    ("kind", "rule", "base", "said"),
    [
        (
            "rungs",
            {"first": 15},
            {},
            "scheduler.first=15 is not a multiple of the trials' eval.every=10.* set it to 20",
        ),
        ("asha", {"first": 80}, {}, "scheduler.first=80 is not below train.max_steps=80.*scheduler.type=none"),
        ("rungs", {}, {"eval": {"every": 80}}, "eval.every=80 is not below train.max_steps=80"),
        ("rungs", {}, {"eval": {}}, "eval.every: trials are compared at steps"),
        ("pbt", {"every": 15}, {}, "scheduler.every=15 is not a multiple"),
        (
            "pbt",
            {"every": 10},
            {"train": {"global_batch": 8, "epochs": 1}},
            "pbt with train.epochs.*set train.max_steps",
        ),
    ],
)
def test_steps_without_anything_to_compare_are_refused(kind: str, rule: Any, base: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        steps_of(kind, 8, base, **rule)


def test_another_sweep_does_not_go_on() -> None:
    spec, base = make_sweep(2), load_base()
    log = [begun_of(spec, base)]
    check_same(spec, begun_of(spec, base), log)
    with pytest.raises(ResumeError, match=r'search=.*"trials": 3.*the sweep s was begun with .*"trials": 2'):
        check_same(make_sweep(3), begun_of(make_sweep(3), base), log)


def test_a_sweep_does_not_go_on_with_another_evaluation() -> None:
    """One rung would compare what was measured on two sets of rows."""
    spec = make_sweep(2)
    data = {"train": BASE["data"]["train"], "eval": [{"name": "held", "path": "here/e.jsonl", "rows": {"first": 50}}]}

    def begun(**sections: Any) -> SweepBegun:
        return begun_of(spec, load_config({**BASE, "data": data, **sections}))

    def with_eval(**changes: Any) -> SweepBegun:
        return begun(data={**data, "eval": [{**data["eval"][0], **changes}]})

    log = [begun()]
    check_same(spec, with_eval(path="there/e.jsonl"), log)
    task = {"type": "choices", "path": "questions.jsonl"}
    for other, field in [
        (with_eval(path="here/f.jsonl"), "data.eval"),
        (with_eval(rows={"first": 60}), "data.eval"),
        (with_eval(name="other"), "data.eval"),
        (with_eval(format={"type": "completion"}), "data.eval"),
        (begun(data={**data, "eval": {"fraction": 0.1}}), "data.eval"),
        (begun(eval={**BASE["eval"], "tasks": [task]}), "eval.tasks"),
        (begun(eval={**BASE["eval"], "early_stop": {}}), "eval.early_stop"),
    ]:
        with pytest.raises(ResumeError, match=rf"^{field}=.*the sweep s was begun with .*, and so are the trials"):
            check_same(spec, other, log)
        # A log of an older version does not say: it goes on.
        older = SweepBegun(log[0].decides, {k: v for k, v in log[0].base.items() if k not in ADDED_LATER}, False)
        check_same(spec, other, [older])


def test_a_sweep_does_not_go_on_with_another_recipe(tmp_path: Path) -> None:
    """Not only that of its first trial."""
    recipes = [tmp_path / f"{name}.yaml" for name in ("a", "b")]

    def begun(batch: int) -> tuple[SweepSpec, SweepBegun]:
        for path, size in zip(recipes, (8, batch), strict=True):
            path.write_text(dump({**BASE, "train": {**BASE["train"], "global_batch": size}}))
        spec = make_sweep(2, base={}, search={"type": "grid"}, space={"recipe": {"grid": list(map(str, recipes))}})
        return spec, begun_of(spec, check_trials(spec, trials_of(spec))[0])

    log = [begun(8)[1]]
    check_same(*begun(8), log)
    with pytest.raises(ResumeError, match=rf"^train.global_batch of the recipe {recipes[1]}=16: the sweep s was begun"):
        check_same(*begun(16), log)
    older = {key: value for key, value in log[0].base.items() if key != "recipes"}
    check_same(*begun(16), [SweepBegun(log[0].decides, older, False)])


def test_a_sweep_does_not_go_on_with_another_base() -> None:
    spec = make_sweep(2)
    log = [begun_of(spec, load_base())]

    def changed(**sections: Any) -> SweepBegun:
        tree = {**BASE, **{name: {**BASE.get(name, {}), **values} for name, values in sections.items()}}
        return begun_of(spec, load_config(tree))

    check_same(spec, changed(checkpoint={"every": 5}, model={"path": "moved/to/model"}, cluster={"workers": 3}), log)
    with pytest.raises(ResumeError) as refused:
        check_same(
            spec, changed(train={"global_batch": 4}, optim={"weight_decay": 0.5}, model={"path": "a/nother"}), log
        )
    assert [line.split("=")[0] for line in refused.value.args] == [
        "model.path", "optim.weight_decay", "train.global_batch",
    ]  # fmt: skip
    assert (
        "train.global_batch=4: the sweep s was begun with 8, and so are the trials that it compares: set it back"
        in (refused.value.args[2])
    )


@pytest.mark.parametrize(
    "field",
    [
        "data.window",
        "method",
        "optim.groups",
        "optim.groups.0.lr_ratio",
        "train.global_batch",
    ],
)
def test_a_population_is_refused_what_a_fork_may_not_change(field: str) -> None:
    values = {
        "method": [{"type": "full"}, {"type": "lora", "rank": 8}],
        "optim.groups": [[], [{"match": "a", "lr": 1.0}]],
    }
    space = {"optim.lr": {"loguniform": [1e-5, 1e-2]}, field: {"choice": values.get(field, [8, 16])}}
    spec = make_sweep(4, space=space, scheduler={"type": "pbt", "every": 20})
    with pytest.raises(
        ConfigError, match=rf"space\.{field} with scheduler.type=pbt.*\(of optim\.lr\), leave {field} out"
    ):
        scheduler_of(spec, World(spec).configs)
    only = make_sweep(4, space=space, scheduler={"type": "pbt", "every": 20, "change": ["optim.lr"]})
    scheduler_of(only, World(only).configs)


def test_a_population_changes_no_momentum_by_which_an_optimizer_keeps_more() -> None:
    """Without it SGD keeps no sum of gradients; muon always keeps one."""
    space = {"optim.optimizer.momentum": {"choice": [0.9, 0.0, 0.95]}}

    def scheduler(optimizer: str) -> Scheduler:
        base = {**BASE, "optim": {"optimizer": {"type": optimizer}}}
        spec = make_sweep(4, base=base, space=space, scheduler={"type": "pbt", "every": 20})
        return scheduler_of(spec, check_trials(spec, trials_of(spec)))

    with pytest.raises(ConfigError, match=r"space.optim.optimizer.momentum with scheduler.type=pbt: .*sgd has a mom"):
        scheduler("sgd")
    scheduler("muon")


def test_a_grid_whose_fields_are_in_another_order_does_not_go_on() -> None:
    """Its trials would have other numbers; nothing is wrong with the log."""
    fields = {"optim.lr": [1e-4, 1e-3], "train.z_loss": [0.0, 1e-4]}

    def begun(kind: str, *order: str, **values: Any) -> tuple[SweepSpec, list[Entry]]:
        each = {field: {kind: {**fields, **values}[field]} for field in order}
        spec = make_sweep(4, space=each, **({"search": {"type": "grid"}} if kind == "grid" else {}))
        return spec, [begun_of(spec, load_base()), *trials_of(spec)]

    _, log = begun("grid", *fields)
    other, (now, *_) = begun("grid", *reversed(fields))
    with pytest.raises(
        ResumeError, match="^space: .* order train.z_loss, optim.lr, and the sweep s was begun with opt"
    ):
        check_same(other, now, log)
    # Draws go by the names of their fields, and some orders give the same trials.
    for kind, values in (("choice", {}), ("grid", {"train.z_loss": [0.0]})):
        _, log = begun(kind, *fields, **values)
        other, (now, *_) = begun(kind, *reversed(fields), **values)
        check_same(other, now, log)


def test_a_log_with_trials_of_another_space_is_refused() -> None:
    """A stranger's could set any field of a config, such as one by which code runs."""
    spec, base = make_sweep(2), load_base()
    begun, own = begun_of(spec, base), trials_of(spec)
    check_same(spec, begun, [begun, own[0]])
    with pytest.raises(ResumeError, match="the log of s has another trial 0 than its space gives"):
        check_same(spec, begun, [begun, Trial(0, {"model.trust_remote_code": True}, 0)])
    with pytest.raises(ResumeError, match="the log of s changes data.train of trial 1, which is not in space"):
        check_same(spec, begun, [begun, *own, Draw(1, 20, 0, {"optim.lr": 1e-3, "data.train": []})])


def test_a_population_of_which_nobody_goes_on_is_refused() -> None:
    spec = make_sweep(4, scheduler={"type": "pbt", "every": 20})
    log = [begun_of(spec, load_base()), *trials_of(spec), *at(20, 1.0, 2.0, 3.0, 4.0), Decision(20, (), (0, 1, 2, 3))]
    with pytest.raises(ResumeError, match="after step 20 no trial goes on that was measured"):
        scheduler_of(spec, [load_base()] * 4).next(trials_of(spec), log)
