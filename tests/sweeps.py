"""Sweeps without processes: trials whose values follow from what they train with, in any order and under any kills."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from raytune_fsdp.base.random import derive_key
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.tune.log import Decision, Draw, Entry, TrialEnded, Value, generation, trials_in
from raytune_fsdp.tune.schedulers.choose import scheduler_of
from raytune_fsdp.tune.schedulers.protocol import Found, Scheduler, Stretch
from raytune_fsdp.tune.space import trials_of
from raytune_fsdp.tune.spec import SweepSpec, load_sweep
from raytune_fsdp.tune.turn import begun_of, turn

EVERY, LAST = 10, 80
BASE: dict[str, Any] = {
    "run": {"name": "base"},
    "model": {"path": "some/model"},
    "data": {"train": [{"path": "a.jsonl"}]},
    "train": {"global_batch": 8, "max_steps": LAST},
    "eval": {"every": EVERY},
}


@cache
def load_base() -> FinetuneConfig:
    return load_config(BASE)


def make_sweep(trials: int = 8, **more: Any) -> SweepSpec:
    given = {
        "name": "s",
        "base": BASE,
        "space": {"optim.lr": {"loguniform": [1e-5, 1e-2]}, "train.z_loss": {"choice": [0.0, 1e-4, 1e-3]}},
        "search": {"type": "random", "trials": trials, "seed": 1},
    }
    return load_sweep({**given, **more})


class World:
    """What the records of all runs hold."""

    def __init__(self, spec: SweepSpec, *, buckets: int = 1000, fails: Mapping[int, int] | None = None) -> None:
        """`buckets`: how many values there are; few mean ties. `fails`: after which step a trial's first run fails."""
        self.spec, self.buckets, self.fails = spec, buckets, fails or {}
        self.configs: list[FinetuneConfig] = [load_base()] * len(trials_of(spec))
        self.found: list[tuple[int, Found]] = []
        """With the generation of the run."""
        self.trained: dict[tuple[int, int], int] = {}
        self.ended: set[tuple[int, int]] = set()

    @property
    def scheduler(self) -> Scheduler:
        return scheduler_of(self.spec, self.configs)

    def value(self, trial: int, changes: Mapping[str, Any], step: int) -> float:
        key = derive_key("value", trial if self.spec.seeds > 1 else 0, json.dumps(changes), step)
        return float(key % self.buckets) if key % 17 or self.buckets > 500 else math.nan

    def of(self, log: Sequence[Entry]) -> list[Found]:
        """What is found in the newest runs' records."""
        newest = {trial: generation(trial, log) for trial in range(len(self.configs))}
        return [each for run, each in self.found if run == newest[each.trial]]

    def done(self, stretch: Stretch) -> bool:
        run = stretch.trial, stretch.generation
        return run in self.ended or (stretch.until is not None and self.trained.get(run, 0) >= stretch.until)

    def train(self, stretch: Stretch) -> None:
        """Train to the next evaluation."""
        run = stretch.trial, stretch.generation
        step = self.trained[run] = self.trained.get(run, stretch.fork[1] if stretch.fork else 0) + EVERY
        self.found.append((run[1], Value(run[0], step, self.value(run[0], stretch.changes, step))))
        error = "it is broken" if self.fails.get(run[0]) == step and run[1] == 0 else None
        if error or step == LAST:
            self.ended.add(run)
            self.found.append((run[1], TrialEnded(run[0], step, error)))


def play(world: World, log: Sequence[Entry] = (), chance: random.Random | None = None) -> list[Entry]:
    """Sweep on from a log to the end. `chance`: who is how fast, when the sweep is killed, and what that loses."""
    entries, scheduler = list(log) or [begun_of(world.spec, world.configs[0])], world.scheduler
    chance = chance or random.Random(0)
    while True:
        said = turn(world.spec, scheduler, entries, world.of(entries))
        if chance.random() < 0.2:  # killed while it wrote; what it finds again comes in another order
            entries += said.entries[: chance.randint(0, len(said.entries))]
            chance.shuffle(world.found)
            # Of one record, everything still comes in the order of its steps.
            world.found.sort(key=lambda each: (each[1].step, isinstance(each[1], TrialEnded)))
            scheduler = world.scheduler
            continue
        entries += said.entries
        if said.over:
            return entries
        running = [each for each in said.stretches if not world.done(each)][: world.spec.concurrent]
        if running:
            world.train(chance.choice(running))
        else:  # the records of new forks are looked at in the next turn
            assert said.entries, "the sweep is not over, and nothing may run"


def check_follows(scheduler: Scheduler, log: Sequence[Entry], trials: int) -> None:
    """Play a log back: after each of its entries the scheduler says what comes next on it, where it decides."""
    for number, entry in enumerate(log[1:], 1):
        before = log[:number]
        if len(trials_in(before)) < trials:
            continue
        said = list(scheduler.next(trials_in(before), before).entries[:1])
        assert said == ([entry] if isinstance(entry, Decision | Draw) else [])
