"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.config.sections.optim import OneCycleSchedule
from raytune_fsdp.plan.plan import Plan


def lr_factor(step: int, config: OptimConfig, plan: Plan) -> float:
    """Return the fraction of the peak learning rate at a step; the first step is 1. Pure."""
    return multiplier(step, config, schedule_steps=plan.schedule_steps, warmup_steps=plan.warmup_steps)


def multiplier(step: int, config: OptimConfig, *, schedule_steps: int, warmup_steps: int) -> float:
    """Return the fraction of the peak learning rate at a step of a schedule of this length. Pure.

    Warmup reaches the peak at its last step. The decay starts from the peak one step later and would reach the floor
    one step after the schedule's end; a run that goes on longer stays there.
    """
    schedule = config.schedule
    if step <= warmup_steps:
        return step / warmup_steps
    after = step - 1 - warmup_steps
    if schedule.type == "constant":
        return 1.0
    if schedule.type == "inverse_sqrt":
        timescale = schedule.timescale or warmup_steps or 10_000
        return math.sqrt(timescale / (timescale + after))
    if schedule.type == "one_cycle":
        return _one_cycle(step, schedule, schedule_steps)
    progress = min(1.0, after / max(1, schedule_steps - warmup_steps))
    if schedule.type == "linear":
        shape = 1.0 - progress
    elif schedule.type == "cosine":
        shape = _half_cosine(1.0, 0.0, progress)
    elif schedule.type == "polynomial":
        shape = (1.0 - progress) ** schedule.power
    else:
        decay_steps = max(1, round(schedule.decay * schedule_steps))
        shape = min(1.0, max(0, schedule_steps - (step - 1)) / decay_steps)
    return schedule.floor + (1.0 - schedule.floor) * shape


def _one_cycle(step: int, schedule: OneCycleSchedule, steps: int) -> float:
    """Rise from the first step to the peak, and fall from there to the last step."""
    peak = max(0.0, schedule.rise * steps - 1)
    if step - 1 < peak:
        return _half_cosine(schedule.start, 1.0, (step - 1) / peak)
    return _half_cosine(1.0, schedule.floor, min(1.0, (step - 1 - peak) / max(1.0, steps - 1 - peak)))


def _half_cosine(first: float, last: float, progress: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * progress))
