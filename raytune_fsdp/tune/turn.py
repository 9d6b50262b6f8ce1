"""One turn of a sweep: from the log and what trials have measured to what is decided, and what may run now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from raytune_fsdp.base.errors import ConfigError, ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.problems import shown
from raytune_fsdp.tune.log import WAY_OUT, Draw, Entry, SweepBegun, Trial, trials_in
from raytune_fsdp.tune.schedulers.protocol import Found, Scheduler, Stretch
from raytune_fsdp.tune.space import ADDED_LATER, base_of, config_of, differing, trials_of
from raytune_fsdp.tune.spec import RECIPE, GridSearch, OptunaSearch, SweepSpec


@dataclass(frozen=True, slots=True)
class Turn:
    entries: Sequence[Entry]
    """What belongs on the log, before anything is started."""

    stretches: Sequence[Stretch]
    """What may run now, the most urgent first; what `schedulers/protocol.py:Next.stretches` says of it holds here."""

    over: bool
    """Whether the sweep is over."""


def turn(spec: SweepSpec, scheduler: Scheduler, log: Sequence[Entry], found: Sequence[Found]) -> Turn:
    """Return what follows from the log and from what the trials' records hold. Pure.

    `log`: of this sweep (`check_same`). `found`: as `schedulers/protocol.py:Scheduler.taken` gets it.
    """
    entries = list(log)
    # One entry at a time, so that each follows from those before it: a log that a crash has cut anywhere goes on to the
    # same end.
    given = None if isinstance(spec.search, OptunaSearch) else trials_of(spec)
    while True:
        trials, known = given or trials_of(spec, entries), trials_in(entries)
        if len(known) < len(trials):
            entries.append(trials[len(known)])
            continue
        said = scheduler.next(known, entries)
        if said.entries:
            entries.append(entry := said.entries[0])
            if isinstance(entry, Draw):  # what was found of this trial is of a run that is no longer its newest
                found = [each for each in found if each.trial != entry.trial]
            continue
        if taken := scheduler.taken(known, entries, found):
            entries.append(taken[0])
            continue
        return Turn(entries[len(log) :], said.stretches, said.over)


def begun_of(spec: SweepSpec, first: FinetuneConfig, threads: int | None = None) -> SweepBegun:
    """Return the first entry of a sweep's log. `first`: the config of its first trial. `threads`: what it says."""
    recipes = {_RECIPES: _bases_of_recipes(spec)} if RECIPE in spec.space else {}
    return SweepBegun(spec.decides, {**base_of(first), **recipes}, spec.highest, threads)


def with_metric(was: SweepBegun, now: SweepBegun, log: Sequence[Entry]) -> SweepBegun:
    """Return the first entry of a sweep that goes on: as it was, with today's metric if nothing follows from that yet.

    Whether the trials have such a value shows only when one was measured.
    """
    if not all(isinstance(entry, SweepBegun | Trial) for entry in log):
        return was
    return replace(was, decides={**was.decides, "metric": now.decides.get("metric")}, highest=now.highest)


def check_same(spec: SweepSpec, now: SweepBegun, log: Sequence[Entry]) -> None:
    """Refuse to go on with a log of another sweep. `now`: what its first entry would be. Raises ResumeError."""
    was = with_metric(next((entry for entry in log if isinstance(entry, SweepBegun)), now), now, log)
    decides = {**was.decides, "highest": was.highest}, {**now.decides, "highest": now.highest}
    follows = [(each, "and its log follows from that") for each in differing(*decides)]
    follows += [(each, "and so are the trials that it compares") for each in _of_bases(was.base, now.base)]
    other = [
        f"{field}={shown(new)}: the sweep {spec.name} was begun with {shown(old)}, {why}: set it back, or give the "
        "sweep another name"
        for (field, old, new), why in follows
    ]
    if other:
        raise ResumeError(*other)
    known = trials_in(log)
    drawn = [(each.trial, each.changes) for each in log if isinstance(each, Draw)]
    if isinstance(spec.search, OptunaSearch):
        drawn += [(each.number, each.changes) for each in known]
    elif strange := [each.number for each, own in zip(known, trials_of(spec), strict=False) if each != own]:
        before, today = (", ".join(each["space"]) for each in decides)
        if isinstance(spec.search, GridSearch) and before != today:
            raise ResumeError(
                f"space: its fields are in the order {today}, and the sweep {spec.name} was begun with {before}, in "
                "which a grid counts its trials: set that back, or give the sweep another name"
            )
        raise ResumeError(f"the log of {spec.name} has another trial {strange[0]} than its space gives: {WAY_OUT}")
    for trial, changes in drawn:
        if strange_fields := sorted(set(changes) - set(spec.values)):
            raise ResumeError(
                f"the log of {spec.name} changes {strange_fields[0]} of trial {trial}, which is not in space: {WAY_OUT}"
            )


def _of_bases(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs in the base, or in those of the recipes. What a log of an older version lacks is the same."""
    pairs = {"": (was, now)}
    before = was.get(_RECIPES)
    for recipe, base in now.get(_RECIPES, {}).items():
        if isinstance(before, Mapping) and isinstance(before.get(recipe), Mapping):
            pairs[f" of the recipe {recipe}"] = (before[recipe], base)
    for about, (old, new) in pairs.items():
        lacking = {key: new[key] for key in ADDED_LATER if key in new}
        for field, then, today in differing({**lacking, **old}, new):
            if field != _RECIPES:
                yield f"{field}{about}", then, today


def _bases_of_recipes(spec: SweepSpec) -> dict[str, dict[str, Any]]:
    """Return what the config of a trial says with each recipe, and with the first values of the other fields."""
    found = {}
    for recipe in spec.values[RECIPE].items:
        changes = {field: recipe if field == RECIPE else values.items[0] for field, values in spec.values.items()}
        with suppress(ConfigError):  # they may not go together, where values are drawn
            found[str(recipe)] = base_of(config_of(spec, Trial(0, changes, 0)))
    return found


_RECIPES = "recipes"
"""In the base of a sweep whose trials have recipes: that of each (`_bases_of_recipes`)."""
