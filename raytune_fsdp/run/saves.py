"""The saves of an attempt, by its config: what is kept of them, and when the clock asks for one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import Saved
from raytune_fsdp.checkpoint.by_clock import Clock, Intervals
from raytune_fsdp.checkpoint.catalogue import Keep
from raytune_fsdp.checkpoint.on_demand import Requests
from raytune_fsdp.checkpoint.saver import Saver, open_saver
from raytune_fsdp.config import CheckpointConfig, FinetuneConfig
from raytune_fsdp.config.every import SaveEvery
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import each_event, read_evaluations, seconds_after
from raytune_fsdp.record.names import highest_is_best, score
from raytune_fsdp.record.tracker import Tracker
from raytune_fsdp.run.saving import NothingSaved, Saves
from raytune_fsdp.run.standing import Prepared, Standing
from raytune_fsdp.step.optim import Optimizer

LOST = "lost_seconds"
"""Of the event that an attempt has started: what those before it have trained since its checkpoint. They may all have
failed before the clock asked for the next one."""


def open_saves(
    config: FinetuneConfig,
    prepared: Prepared,
    standing: Standing,
    model: PreTrainedModel,
    optimizer: Optimizer,
    tracker: Tracker,
    *,
    saved: Callable[[Saved], None],
    lost: float,
    notices: Mapping[str, float],
) -> Saves:
    """Collective. `lost`: the seconds that earlier attempts have trained since the newest checkpoint. `notices`: those
    that what may end the run leaves it."""
    clock, intervals = None, intervals_of(config.checkpoint)
    if intervals is not None and dist.get_rank() == 0 and not prepared.dry:
        clock = Clock(intervals, fresh=standing.checkpoint is None, lost=lost)
    return (NothingSaved if prepared.dry else Saves)(
        saver=_saver(config.checkpoint, prepared, standing, model, optimizer),
        tracker=tracker,
        requests=Requests(prepared.place.path),
        saved=saved,
        clock=clock,
        notices=_not_said(prepared.place, notices) if dist.get_rank() == 0 else {},
        committed=standing.state.step,
        recovery=standing.state.step if standing.checkpoint is not None and not standing.checkpoint.lasting else 0,
    )


def _not_said(place: RunDir, notices: Mapping[str, float]) -> dict[str, float]:
    """Those that no attempt has said to be too short."""
    said = [
        event["fields"].get("notices") for event in each_event(place.events) if event["event"] == names.NOTICE_SHORT
    ]
    known = [each for each in said if isinstance(each, dict)]
    return {what: each for what, each in notices.items() if not any(one.get(what) == each for one in known)}


def lost_seconds(place: RunDir, step: int) -> float:
    """How long earlier attempts have trained since the checkpoint of this step, the run's newest, was made. To be asked
    before the record of what they have trained is cut."""
    started: dict[str, Any] = {}
    for event in each_event(place.events):
        if event["event"] == names.ATTEMPT_STARTED:
            started = event["fields"]
    before = started.get(LOST) if started.get("resumed_from") == step else None
    found = (float(before) if isinstance(before, int | float) else 0.0) + seconds_after(place.metrics, step)
    return found if 0 <= found < math.inf else 0.0


def intervals_of(chosen: CheckpointConfig) -> Intervals | None:
    """How long the clock waits; None if it never asks for a checkpoint."""
    if chosen.every == "auto":
        return Intervals()
    minutes = chosen.every.minutes if isinstance(chosen.every, SaveEvery) else None
    return None if minutes is None else Intervals(first=60 * minutes, later=60 * minutes, share=None)


def keep_of(chosen: CheckpointConfig) -> Keep:
    """Which checkpoints a config keeps."""
    highest = highest_is_best(chosen.best, chosen.best_is)
    return Keep(last=chosen.keep_last, every=chosen.keep_every, best=chosen.keep_best, lower_is_better=not highest)


def _saver(
    chosen: CheckpointConfig, prepared: Prepared, standing: Standing, model: PreTrainedModel, optimizer: Optimizer
) -> Saver:
    scores = {}  # of earlier attempts too, or their best checkpoints would be pruned
    if dist.get_rank() == 0 and chosen.keep_best:
        found = read_evaluations(prepared.place.metrics, standing.state.step)
        scores = {step: score(values, chosen.best) for step, values in found.items()}
    return open_saver(
        prepared.place.checkpoints,
        model,
        optimizer,
        attempt=standing.attempt,
        keep=keep_of(chosen),
        seconds=chosen.timeout_minutes * 60,
        asynchronous=chosen.asynchronous,
        scores={step: value for step, value in scores.items() if value is not None},
    )
