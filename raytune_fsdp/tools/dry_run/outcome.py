"""Read the outcome of a dry run from the record of its two steps, and say it in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction

import torch

from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.base.errors import ConfigError, TrainingError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.record import names
from raytune_fsdp.record.console import duration, gibibytes, short
from raytune_fsdp.record.jsonl import each_line, read_events
from raytune_fsdp.record.lines import metrics_of, time_of
from raytune_fsdp.run.resume_point import RunInputs
from raytune_fsdp.step.parallel import memory_of as memory_here
from raytune_fsdp.tools.dry_run.trial import STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What two steps took. Its fields are the keys of `--json`."""

    name: str
    ranks: int
    device: str
    """`cuda: ` or `cpu: `, and its name."""
    memory_bytes: int
    """The peak memory of the rank with the most: on a GPU, of tensors; on a CPU, its resident set."""
    memory_bytes_least: int
    """The peak memory of the rank with the least."""
    reserved_bytes: int | None
    """On GPUs, what torch's allocator took, tensors and the gaps between them, on the rank with the most."""
    device_bytes: int | None
    predicted_bytes: int | None
    """The planner's prediction of tensors at the peak, for a step in which every token is trained on."""
    predicted_where: str
    """The part of the step in which that peak is; without a prediction, why there is none."""
    host_bytes: int | None
    """Host memory in use on the node that uses most, by everything on it."""
    load_seconds: float
    """Seconds from the start of the command to the first step."""
    first_step_seconds: float
    second_step_seconds: float
    tokens_per_second: float
    mfu: float | None
    filled: float
    """Fraction of the second step's places that hold a token; the others are padding, computed all the same."""
    trained_on: float
    """Fraction of these tokens that are trained on."""
    steps: int
    """The steps of the whole run."""
    steps_are_estimated: bool
    """Whether `steps` is an estimate, from the first window of the data."""
    run_seconds: float
    """The time of the whole run, if each step takes as long as the second one."""


def measured(config: FinetuneConfig, trial: FinetuneConfig, prepared: RunInputs, began: float) -> DryRun:
    """Read the record of the trial, which has ended. It began at this time (seconds since 1970)."""
    lines = [line for line in each_line(prepared.place.metrics) if line is not None and line["kind"] == "step"]
    if len(lines) != STEPS:
        raise TrainingError(f"{len(lines)} of {STEPS} steps are on record: another command has removed what they wrote")
    first, second = lines
    one, two = metrics_of(first), metrics_of(second)
    plan = resolve(trial, second["world_size"])
    events = {event["event"]: event["fields"] for event in read_events(prepared.place.events)}
    device, predicted = str(events[names.ATTEMPT_STARTED]["device"]), events[names.PREDICTED]
    steps, estimated = _steps_of(config, trial, prepared)
    ranks = second["rank_memory_bytes"] or [two.memory_bytes]
    return DryRun(
        name=config.run.name,
        ranks=plan.layout.world,
        device=device,
        memory_bytes=max(ranks),
        memory_bytes_least=min(ranks),
        reserved_bytes=second["reserved_bytes"],
        device_bytes=device_bytes(device),
        predicted_bytes=predicted.get("peak_bytes"),
        predicted_where=predicted.get("where") or predicted["because"],
        host_bytes=second["host_memory_bytes"],
        # The clock of rank 0's machine may be another one.
        load_seconds=max(0.0, (time_of(first) or 0) / 1000 - one.step_seconds - began),
        first_step_seconds=one.step_seconds,
        second_step_seconds=two.step_seconds,
        tokens_per_second=two.tokens_per_second,
        mfu=two.mfu,
        filled=two.tokens / (plan.division.global_batch * config.data.seq_len),
        trained_on=two.target_tokens / max(1, two.tokens),
        steps=steps,
        steps_are_estimated=estimated,
        run_seconds=steps * two.step_seconds,
    )


def device_bytes(device: str) -> int | None:
    """Return the memory of a device as the record names it (`cuda: NVIDIA H100 80GB HBM3`); None if it is not known.

    For a CPU, that is the memory of this machine.
    """
    kind, _, name = device.partition(": ")
    if kind == "cuda":
        try:
            return int(find_device(name).memory)
        except ConfigError:
            here = torch.cuda.is_available() and torch.cuda.get_device_name(0) == name
            return memory_here(torch.device("cuda", 0)) if here else None
    return memory_here(torch.device("cpu"))


def _steps_of(config: FinetuneConfig, trial: FinetuneConfig, prepared: RunInputs) -> tuple[int, bool]:
    """Return the steps of the whole run, and whether that is an estimate: epochs are only known after a full count."""
    if config.train.epochs is None:
        assert config.train.max_steps is not None, "a config has one of the two"
        return config.train.max_steps, False
    windows = prepared.train
    window, _ = Stream(windows, seed=trial.run.seed).load(Cursor(), 0)
    inside = sum(dataset.rows for dataset in window.counts.datasets)  # the last window of the data has fewer
    census = Census(seq_len=windows.seq_len, epochs=(math.ceil(len(window.samples) * windows.rows(0) / inside),))
    steps = math.ceil(census.samples_in(Fraction(str(config.train.epochs))) / config.train.global_batch)
    return steps, not (windows.repeats and windows.count(0) == 1)


def to_json(found: DryRun) -> str:
    return json.dumps(asdict(found), indent=2)


def in_words(found: DryRun) -> Iterator[str]:
    """Yield a heading, and a line for each thing that was measured."""
    ranks = f"{found.ranks} rank{'s' * (found.ranks != 1)}"
    yield f"{found.name} fits: {STEPS} steps of a dry run on {ranks}, {found.device}"
    for name, value in _rows(found):
        yield f"{name:10} {value}"
    yield "nothing is left of it"


def _rows(found: DryRun) -> Iterator[tuple[str, str]]:
    of = "" if found.device_bytes is None else f" of {gibibytes(found.device_bytes)}"
    least = f" (the least: {gibibytes(found.memory_bytes_least)})" if found.ranks > 1 else ""
    if found.reserved_bytes is None:
        yield "memory", f"{gibibytes(found.memory_bytes)} of the host in the largest rank{least}"
        if found.host_bytes is not None:
            yield "host", f"{gibibytes(found.host_bytes)} in use on the fullest node, by everything on it"
    else:
        yield "memory", f"{gibibytes(found.memory_bytes)} allocated at most{least}"
        yield "reserved", f"{gibibytes(found.reserved_bytes)} at most{of}"
    if found.predicted_bytes is None:
        yield "predicted", f"not known: {found.predicted_where}"
    else:
        yield "predicted", f"{gibibytes(found.predicted_bytes)} of tensors at the peak ({found.predicted_where})"
    yield "load", f"{found.load_seconds:.1f} s until the first step"
    yield "steps", f"the first {found.first_step_seconds:.3g} s, the second {found.second_step_seconds:.3g} s"
    mfu = "" if found.mfu is None else f", MFU {100 * found.mfu:.1f} %"
    yield "speed", f"{short(found.tokens_per_second)} tokens/s{mfu}"
    yield "data", f"{100 * found.filled:.1f} % of a step are tokens, {100 * found.trained_on:.1f} % of them trained on"
    about = "about " if found.steps_are_estimated else ""
    yield (
        "run",
        (
            f"{about}{found.steps:,} steps x {found.second_step_seconds:.3g} s = {about}{duration(found.run_seconds)}, "
            "without evaluations and what is saved"
        ),
    )
