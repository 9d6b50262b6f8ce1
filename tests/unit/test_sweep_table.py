"""Who leads a sweep, and what of a difference seeds explain."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest

from raytune_fsdp.tune.log import Decision, Draw, Entry, SweepBegun, Trial, TrialEnded, Value
from raytune_fsdp.tune.table import best_of, leaderboard, over_seeds, standings

TRIALS = [Trial(number, {"optim.lr": number}, number) for number in range(5)]


def numbers(*entries: Entry, highest: bool = False) -> list[int]:
    return [each.trial.number for each in leaderboard([SweepBegun({}, {}, highest), *TRIALS, *entries])]


def best(*entries: Entry, trials: list[Trial] = TRIALS, highest: bool = False) -> int | None:
    found = best_of(leaderboard([SweepBegun({}, {}, highest), *trials, *entries]))
    return None if found is None else found.trial.number


def test_the_leaderboard() -> None:
    log: list[Entry] = [Value(0, 10, 1.0), Value(1, 10, 3.0), Value(2, 10, 2.0), Value(3, 10, math.nan)]
    assert numbers(*log) == [0, 2, 1, 3, 4]
    assert numbers(*log, highest=True) == [1, 2, 0, 3, 4]
    log += [Decision(10, (1, 2), (0, 3)), Value(1, 20, 5.0)]
    assert numbers(*log) == [1, 0, 2, 3, 4]  # who came further is before who did better earlier
    log += [Value(2, 15, 2.0), TrialEnded(2, 15), TrialEnded(1, 30, "broken")]
    assert numbers(*log) == [2, 0, 3, 4, 1]
    states = [(each.state, each.step, each.value) for each in leaderboard([SweepBegun({}, {}, False), *TRIALS, *log])]
    assert states[:2] == [("complete", 15, 2.0), ("stopped", 10, 1.0)]
    assert states[3:] == [("open", 0, None), ("failed", 20, 5.0)]


def test_a_fork_leads_with_its_own_values() -> None:
    log = [
        SweepBegun({}, {}, False),
        *TRIALS,
        Decision(10, (1,), (0,)),
        Draw(0, 10, 1, {"optim.lr": 7}),
        Value(0, 20, 1.0),
    ]
    first = leaderboard(log)[0]
    assert (first.trial.number, first.changes, first.state) == (0, {"optim.lr": 7}, "open")


def test_the_best_has_a_value_and_has_not_failed() -> None:
    assert best() is None
    assert best(Value(0, 10, math.nan)) is None
    assert best(Value(0, 10, math.nan), Value(1, 5, 2.0)) == 1
    assert best(Value(0, 10, 1.0), TrialEnded(0, 10, "broken"), Value(1, 5, 2.0)) == 1
    assert best(Value(0, 10, 2.0), Value(1, 10, 2.0)) == 0
    assert best(Value(0, 10, 1.0), Value(1, 20, 2.0), TrialEnded(1, 20)) == 1


def test_who_ended_early_is_compared_with_those_that_came_furthest() -> None:
    """In a sweep that is not over: a run that its evaluations have ended early is complete, and may be poor."""
    log: list[Entry] = [
        Value(0, 60, 7.9),
        TrialEnded(0, 60),
        Value(1, 400, 2.0),
        Value(2, 200, 1.0),
        Value(3, 400, 9.0),
    ]
    log += [Value(4, 800, 1.0), TrialEnded(4, 800, "broken")]
    assert best(*log) == 1 and numbers(*log) == [1, 0, 3, 2, 4]
    assert best(*log, highest=True) == 3
    assert best(Value(0, 60, 1.5), *log[1:]) == 0, "or good"


def test_the_best_of_seeds_has_the_best_mean() -> None:
    seeds = [Trial(2 * variant + seed, {}, variant, seed) for variant in range(3) for seed in range(2)]
    values = [Value(number, 10, value) for number, value in enumerate([1.0, 9.0, 4.0, 4.0, 3.0])]
    assert best(*values, trials=seeds) == 2  # the last variant lacks a seed
    assert best(*values, Value(5, 10, 4.0), trials=seeds) == 4
    assert best(*values, TrialEnded(3, 10, "broken"), trials=seeds) == 0


def test_seeds_stand_together_where_the_last_of_them_stands() -> None:
    seeds = [
        Trial(2 * variant + seed, {"optim.lr": variant}, variant, seed) for variant in range(4) for seed in range(2)
    ]
    log: list[Entry] = [SweepBegun({}, {}, False), *seeds]
    log += [Value(number, 10, value) for number, value in enumerate([1.0, 9.0, 4.0, 4.5, 3.0, 3.0, 8.0])]
    log += [Decision(10, (2, 3), (0, 1)), Value(2, 20, 2.0), TrialEnded(2, 20), TrialEnded(5, 10, "broken")]
    rows = leaderboard(log)
    assert [(each.trial.number, each.value, each.step, each.state, each.seeds) for each in rows] == [
        (2, 3.25, 10, "open", 2), (0, 5.0, 10, "stopped", 2), (6, None, 0, "open", 2), (4, 3.0, 10, "failed", 2),
    ]  # fmt: skip
    assert rows[0].changes == {"optim.lr": 1} and rows[3].error == "broken"
    alone = standings(log)
    assert [each.trial.number for each in alone] == list(range(8)) and {each.seeds for each in alone} == {1}
    assert (alone[2].value, alone[2].state, alone[7].value) == (2.0, "complete", None)


def test_values_without_a_mean_are_last() -> None:
    seeds = [Trial(2 * variant + seed, {}, variant, seed) for variant in range(3) for seed in range(2)]
    huge = [Value(0, 10, 1.7e308), Value(1, 10, 1.7e308), Value(2, 10, math.inf), Value(3, 10, -math.inf)]
    assert best(*huge, trials=seeds) is None
    assert best(*huge, Value(4, 10, 5.0), Value(5, 10, 6.0), trials=seeds) == 4


def test_over_seeds() -> None:
    trials = [Trial(3 * variant + seed, {}, variant, seed) for variant in range(2) for seed in range(3)]
    losses = [2.0, 3.0, 4.0, 2.1, 3.12, 4.11]
    measured = {number: {10: {"eval/a/loss": loss}} for number, loss in enumerate(losses)}
    measured[0][10]["eval/a/accuracy"] = 0.5
    accuracy, one, two = over_seeds(trials, measured, compared_with=0)
    assert (accuracy.metric, accuracy.seeds, accuracy.mean, accuracy.spread) == ("eval/a/accuracy", 1, 0.5, None)
    assert (one.variant, one.mean, one.spread, one.difference, one.exceeds) == (0, 3.0, 1.0, None, None)
    # Far less than seeds differ by, but in the same way at each of them.
    assert two.difference == pytest.approx(0.11) and two.spread_of_difference == pytest.approx(0.01)
    assert two.exceeds is True and two.seeds == 3
    assert two.spread is not None and two.spread > 0.9


@pytest.mark.parametrize(
    ("differences", "exceeds"),
    [([0.1, 0.1], True), ([0.0, 0.0], False), ([0.1, 0.3], False), ([1.0, 1.1, 1.2], True), ([0.1, 1.1, 2.2], False)],
)
def test_a_difference_within_the_seeds_is_none(differences: list[float], exceeds: bool) -> None:
    seeds = len(differences)
    trials = [Trial(seeds * variant + seed, {}, variant, seed) for variant in range(2) for seed in range(seeds)]
    measured = {seed: {10: {"loss": 0.0}} for seed in range(seeds)}
    measured |= {seeds + seed: {10: {"loss": each}} for seed, each in enumerate(differences)}
    assert over_seeds(trials, measured, compared_with=0)[1].exceeds is exceeds


def test_the_test_is_students() -> None:
    scipy = pytest.importorskip("scipy.stats")
    from raytune_fsdp.tune.table import _T

    assert [round(float(scipy.t.ppf(0.975, degrees)), 3) for degrees in range(1, 31)] == list(_T)
    pairs = [0.3, 0.1, 0.25, 0.6]
    trials = [Trial(4 * variant + seed, {}, variant, seed) for variant in range(2) for seed in range(4)]
    measured = {number: {10: {"loss": pairs[number % 4] if number > 3 else 0.0}} for number in range(8)}
    row = over_seeds(trials, measured, 0)[1]
    assert row.exceeds == (scipy.ttest_1samp(pairs, 0).pvalue < 0.05)
    assert (row.difference, row.spread_of_difference) == (fmean(pairs), stdev(pairs))


def test_seeds_that_only_one_has_do_not_count() -> None:
    trials = [Trial(0, {}, 0, 0), Trial(1, {}, 0, 1), Trial(2, {}, 1, 0)]
    measured = {number: {10: {"loss": loss}} for number, loss in enumerate([1.0, 5.0, 2.0])}
    (_, row) = over_seeds(trials, measured, 0)
    assert (row.difference, row.exceeds, row.spread_of_difference) == (1.0, None, None)
    assert over_seeds(trials, {0: {10: {"loss": math.nan}}}, 0) == []


def test_each_variant_is_compared_at_its_own_last_step() -> None:
    """As rungs leave them: the first variant comes to step 40, the second stops at 20, the third at 10."""
    trials = [Trial(2 * variant + seed, {}, variant, seed) for variant in range(3) for seed in range(2)]

    def measured(trial: int, last: int) -> dict[int, dict[str, float]]:
        return {step: {"loss": 100.0 / step + trial} for step in (10, 20, 30, 40) if step <= last}

    found = {trial: measured(trial, last) for trial, last in enumerate([40, 40, 20, 20, 10, 10])}
    rows = over_seeds(trials, found, compared_with=0)
    assert [(each.variant, each.step, each.seeds, each.difference) for each in rows] == [
        (0, 40, 2, None), (1, 20, 2, 2.0), (2, 10, 2, 4.0),
    ]  # fmt: skip
    # A seed that ended early is compared where it was measured, and so are the others of its variant.
    rows = over_seeds(trials, {**found, 3: measured(3, 10)}, compared_with=0)
    assert [(each.step, each.seeds, each.difference) for each in rows[1:]] == [(10, 2, 2.0), (10, 2, 4.0)]
    rows = over_seeds(trials, {**found, 0: measured(0, 10)}, compared_with=0)
    assert [(each.step, each.difference) for each in rows] == [(10, None), (10, 2.0), (10, 4.0)]


def test_a_step_at_which_a_seed_has_diverged_is_not_passed_over() -> None:
    trials = [Trial(2 * variant + seed, {}, variant, seed) for variant in range(2) for seed in range(2)]
    found = {trial: {10: {"loss": 1.0 + trial}, 20: {"loss": 2.0 * trial}} for trial in range(4)}
    found[3][20] = {"loss": math.nan}
    assert [(each.step, each.seeds, each.difference) for each in over_seeds(trials, found, 0)] == [
        (20, 2, None), (20, 1, 4.0),
    ]  # fmt: skip


def test_what_the_compared_variant_has_at_no_such_step_is_not_compared() -> None:
    trials = [Trial(0, {}, 0, 0), Trial(1, {}, 1, 0)]
    (_, row) = over_seeds(trials, {0: {10: {"loss": 1.0}}, 1: {7: {"loss": 3.0}, 5: {"loss": 4.0}}}, 0)
    assert (row.step, row.mean, row.difference) == (7, 3.0, None)
