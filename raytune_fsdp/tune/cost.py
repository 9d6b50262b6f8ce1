"""What a sweep will take, found out before it starts: it is played through with made-up values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import Plan, resolve, sizes_of
from raytune_fsdp.predict.devices import Device
from raytune_fsdp.tune.log import Entry, TrialEnded, Value, trials_in
from raytune_fsdp.tune.schedulers.protocol import Found, Scheduler
from raytune_fsdp.tune.spec import SweepSpec
from raytune_fsdp.tune.turn import turn

_MOST_TURNS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a sweep takes. Its fields are the keys of `--json`."""

    trials: int
    steps: int
    """Steps of all trials together. A sweep whose trials go on or not as they arrive may take others."""
    full_steps: int
    """The steps that all trials have together, if each is trained to its end."""
    tokens: int
    """Tokens of the steps, with padding."""
    gpu_hours: float | None = None
    """None: no GPU was named."""


def cost_of(
    spec: SweepSpec,
    scheduler: Scheduler,
    configs: Sequence[FinetuneConfig],
    census: Census | None = None,
    *,
    gpu: Device | None = None,
    per_node: int = 8,
) -> Cost:
    """Return what a sweep takes from its beginning. `configs`: those of its first trials. `census`: where the length of
    its trials is given in epochs. `gpu`: on how many of a node (`per_node`) of which the hours are predicted."""
    plans = [resolve(each, sizes_of(each)[-1], census) for each in configs]
    trained = _played(spec, scheduler, [plan.steps for plan in plans])
    known = list(zip(plans, configs, strict=True))
    of = [(*known[min(trial, len(known) - 1)], many) for trial, many in trained.items()]
    tokens = sum(many * plan.division.global_batch * config.data.seq_len for plan, config, many in of)
    hours = None
    if gpu is not None:
        seconds: dict[tuple[int, int, int], float] = {}
        hours = 0.0
        for plan, config, many in of:
            # The rate and the like do not change how long a step takes; sizes do.
            key = (plan.division.global_batch * config.data.seq_len, plan.division.micro_batch, plan.layout.world)
            if key not in seconds:
                seconds[key] = _seconds(config, plan, gpu, per_node)
            hours += many * seconds[key] * plan.layout.world / 3600
    return Cost(
        trials=len(trained), steps=sum(trained.values()), full_steps=sum(plan.steps for plan, *_ in of), tokens=tokens,
        gpu_hours=hours,
    )  # fmt: skip


def _seconds(config: FinetuneConfig, plan: Plan, gpu: Device, per_node: int) -> float:
    from raytune_fsdp.predict.planned import as_long
    from raytune_fsdp.predict.prediction import Cluster, predict
    from raytune_fsdp.predict.subject import ModelSpec

    config = as_long(config, plan)
    cluster = Cluster(device=gpu, per_node=per_node, between=None)
    return float(predict(ModelSpec.of(config, None), config, plan, cluster).seconds.step)


def _played(spec: SweepSpec, scheduler: Scheduler, steps: Sequence[int]) -> dict[int, int]:
    """Return how many steps each trial trains, if the first trial is the best, the second the second, and so on."""
    log: list[Entry] = []
    found: list[Found] = []
    at: dict[tuple[int, int], int] = {}
    trained: dict[int, int] = {}
    for _ in range(_MOST_TURNS):
        now = turn(spec, scheduler, log, found)
        log += now.entries
        if now.over:
            break
        more = bool(now.entries)
        for each in now.stretches:
            key, last = (each.trial, each.generation), steps[min(each.trial, len(steps) - 1)]
            if key not in at:
                found = [one for one in found if one.trial != each.trial]
                at[key] = each.fork[1] if each.fork else 0
            end = last if each.until is None else min(each.until, last)
            if end > at[key]:
                trained[each.trial] = trained.get(each.trial, 0) + end - at[key]
                at[key], more = end, True
                found.append(Value(each.trial, end, float(-each.trial if spec.highest else each.trial)))
                found += [TrialEnded(each.trial, end)] * (end == last)
        if not more:
            break
    return {trial.number: trained.get(trial.number, 0) for trial in trials_in(log)}


def in_words(spec: SweepSpec, cost: Cost, price: float | None = None, *, begun: bool = False) -> list[str]:
    """Say what a sweep takes, in lines. `begun`: part of it is trained already, and counts, too."""
    in_all = " in all" if begun else ""
    share = (
        f", {100 * cost.steps / cost.full_steps:.0f} % of what all would take to their ends" if cost.full_steps else ""
    )
    lines = [f"{cost.trials} trials, {cost.steps:,} steps{in_all}{share}; {cost.tokens / 1e6:,.1f} million tokens"]
    if cost.gpu_hours is not None:
        money = "" if price is None else f", {cost.gpu_hours * price:,.2f}"
        lines.append(f"{cost.gpu_hours:,.2f} GPU-hours predicted{in_all}{money}")
        most = spec.budget.gpu_hours
        if most is not None and cost.gpu_hours > most:
            lines.append(f"that is more than budget.gpu_hours={most:g}: the sweep will stop before it is over")
    return lines
