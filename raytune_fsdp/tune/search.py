"""Which values trials get: every combination, draws at random, or what Optuna proposes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from raytune_fsdp.base.errors import UserError, pip_install
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.tune.history import TrialHistory, histories
from raytune_fsdp.tune.log import Entry, trials_in
from raytune_fsdp.tune.spec import OptunaSearch, SweepSpec, Values


def grid(space: Mapping[str, Values]) -> list[dict[str, Any]]:
    """Return every combination of the values, in the order in which they are written: the last field changes first."""
    return [dict(zip(space, chosen, strict=True)) for chosen in product(*(values.items for values in space.values()))]


def drawn(space: Mapping[str, Values], seed: int, number: int) -> dict[str, Any]:
    """Return a variant's values: what each field gets follows from the seed, the number and the field's name alone."""
    return {field: _value(values, derive_key("sweep", seed, number, field)) for field, values in space.items()}


def _value(values: Values, key: int) -> Any:
    if values.listed:
        return values.items[key % len(values.items)]
    low, high = values.items
    if values.kind == "int":
        return low + key % (high - low + 1)
    part = (key >> 11) / 2**53  # from 0 to below 1
    if values.kind == "uniform":
        return rounded(low + part * (high - low), low, high)
    return rounded(low * math.exp(part * math.log(high / low)), low, high)


def rounded(value: float, low: float, high: float) -> float:
    """Return a value with six digits, as a person would write it, and as every machine's arithmetic gives it."""
    return min(max(float(f"{value:.6g}"), low), high)


# Optuna.


def begun_with_optuna(log: Sequence[Entry], trials: int, concurrent: int) -> int:
    """Return how many trials may have begun: with the first `concurrent`, another one for each that has ended."""
    known = histories(trials_in(log), log)
    return min(trials, concurrent + sum(each.state != "open" for each in known.values()))


def proposed(spec: SweepSpec, search: OptunaSearch, log: Sequence[Entry], number: int) -> dict[str, Any]:
    """Return what Optuna's sampler proposes for a trial, from what the log says of those that have ended.

    Each trial has a study of its own, rebuilt from the log; nothing else is remembered. Without Optuna: UserError.
    """
    try:
        import optuna
    except ImportError:
        raise UserError(
            f"search.type=optuna needs Optuna: run {pip_install('optuna')}, or set search.type=random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = spec.values
    distributions = {field: _distribution(optuna, values) for field, values in space.items()}
    sampler = optuna.samplers.TPESampler(seed=derive_key("optuna", search.seed, number) % 2**32)
    study = optuna.create_study(sampler=sampler, direction="maximize" if spec.highest else "minimize")
    for each in histories(trials_in(log), log).values():
        if each.state != "open":
            study.add_trial(_told(optuna, each, space, distributions))
    asked = study.ask(distributions).params
    return {field: _meant(values, asked[field]) for field, values in space.items()}


def _distribution(optuna: Any, values: Values) -> Any:
    if values.listed:  # by their indexes: values may be lists and maps
        return optuna.distributions.CategoricalDistribution(tuple(range(len(values.items))))
    if values.kind == "int":
        return optuna.distributions.IntDistribution(*values.items)
    return optuna.distributions.FloatDistribution(*values.items, log=values.kind == "loguniform")


def _told(optuna: Any, each: TrialHistory, space: Mapping[str, Values], distributions: Mapping[str, Any]) -> Any:
    spelled = {field: [json.dumps(item) for item in values.items] for field, values in space.items() if values.listed}
    params = {
        field: spelled[field].index(json.dumps(value)) if field in spelled else value
        for field, value in each.trial.changes.items()
    }
    if each.state == "failed" or not math.isfinite(each.last):
        state = optuna.trial.TrialState.FAIL
        return optuna.trial.create_trial(state=state, params=params, distributions=dict(distributions))
    return optuna.trial.create_trial(value=each.last, params=params, distributions=dict(distributions))


def _meant(values: Values, asked: Any) -> Any:
    if values.listed:
        return values.items[asked]
    return int(asked) if values.kind == "int" else rounded(asked, *values.items)
