"""Train a segment of a run again and compare: what no record can prove, its repetition can.

The segment between two committed checkpoints is an ordinary run: it begins with the first one, in a directory of its
own, under the run's own config, and ends at the step of the second. The run that is audited is only read.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raytune_fsdp.api import finetune
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed, verify
from raytune_fsdp.checkpoint.compare import TensorDifference, compare_tensors
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.tensors import MODEL
from raytune_fsdp.config import EvalConfig, FinetuneConfig, HeldOutConfig, ProfileConfig, TrackingConfig
from raytune_fsdp.config.tracking import MlflowConfig
from raytune_fsdp.errors import ConfigError, ResumeError
from raytune_fsdp.run.past import plan_on_record
from raytune_fsdp.rundir import RunDir, cache_of
from raytune_fsdp.tracking.jsonl import read_events, read_metrics
from raytune_fsdp.tracking.names import ATTEMPT_STARTED
from raytune_fsdp.types import Progress
from raytune_fsdp.urls import is_url

EXACT = ("samples", "tokens", "target_tokens", "lr")
"""What of a step is the same at any world size, to the bit."""

BOUNDS = {"fp64": {"loss": 1e-8, "grad_norm": 1e-6}, "fp32": {"loss": 1e-5, "grad_norm": 1e-4}}
"""Worlds add in another order; these are what tests/distributed/test_exact.py holds them to."""
_OTHER_BOUNDS = {"loss": 1e-2, "grad_norm": 1e-1}
"""In 16 bits, where the number of ranks decides what is rounded when, there is no bound that always holds."""
WEIGHTS = {"fp64": 1e-4, "fp32": 5e-2}
"""The largest difference of a weight, in parts of the largest way that a number of its tensor has gone."""
_OTHER_WEIGHTS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The steps that are trained again."""

    first: int
    """0: from the beginning."""
    last: int
    before: CommittedCheckpoint | None
    """The checkpoint of `first`; None: the beginning."""
    after: CommittedCheckpoint | None
    """That of `last`; None: it has not been kept, so only the record is compared."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """What came out."""

    segment: Segment
    why_not_exact: str = ""
    """Why not everything had to be the same to the bit; empty if it had to be."""
    here: Mapping[str, Any] = field(default_factory=dict)
    """Where it was trained again: number of ranks, device, threads, versions."""
    there: Sequence[Mapping[str, Any]] = ()
    """And where the run was, attempt by attempt."""
    largest: dict[str, float] = field(default_factory=dict)
    """The largest relative difference of each number, over all steps."""
    steps: int = 0
    """Steps that were compared."""
    tensors: int = 0
    unequal: int = 0
    """Tensors that were compared, and those of them that are not the same to the bit."""
    weights: float = 0.0
    """The largest difference of a weight, in parts of the largest way that a number of its tensor has gone."""
    difference: str | None = None
    """The first thing that differs; None: the run has passed."""


def choose_segment(place: RunDir, first: int | None, last: int | None) -> Segment:
    """The segment between two kept checkpoints; by default the two newest ones."""
    if is_url(place.checkpoints):
        raise ConfigError(
            f"{place.checkpoints} is in an object store, and an audit reads checkpoints from a file system: copy those "
            f"of the segment to {place.path}/checkpoints, and remove {place.checkpoints_at.name} there"
        )
    kept = {each.step: each for each in committed(place.checkpoints)}
    there = ", ".join(map(str, sorted(kept))) or "none"
    last = max(kept, default=0) if last is None else last
    first = max((step for step in kept if step < last), default=0) if first is None else first
    if first and first not in kept:
        raise ConfigError(f"--from {first}: {place.checkpoints} has no checkpoint of that step; it has {there}, or 0")
    if not first < last:
        raise ConfigError(f"--from {first} --to {last}: a segment has at least one step; kept checkpoints: {there}")
    steps = plan_on_record(place).steps
    if last > steps:
        raise ConfigError(f"--to {last}: the run has {steps} steps")
    return Segment(first=first, last=last, before=kept.get(first), after=kept.get(last))


def audit(
    config: FinetuneConfig, place: RunDir, segment: Segment, directory: Path, progress: Progress | None = None
) -> Audit:
    """Train the segment again in `directory`, which is empty, and compare. `config` is the run's, read from it.

    Raises what keeps it from being trained at all, such as a model that is not there; all else is a finding.
    """
    found = Audit(segment=segment)
    for checkpoint in filter(None, (segment.before, segment.after)):
        if problem := verify(checkpoint, hashes=True):
            found.difference = f"{checkpoint.path} is damaged: {problem}"
            return found
    record = _steps(place.metrics, segment)
    missing = [step for step in range(segment.first + 1, segment.last + 1) if step not in record]
    if missing:
        found.difference = f"step {missing[0]} is not on record: {place.metrics} has {len(record)} of the steps"
        return found
    repeat = _repeat_of(config, place, segment, directory)
    again = RunDir.of(repeat)
    if segment.before is not None:
        _take(segment.before, Path(again.checkpoints))
    try:
        finetune(repeat, progress)
    except ResumeError as error:  # another seed, other data: what decides the trajectory has changed since
        found.difference = str(error)
        return found
    _compare(found, config, place, again, record)
    return found


def _repeat_of(config: FinetuneConfig, place: RunDir, segment: Segment, directory: Path) -> FinetuneConfig:
    """The config of the run that trains the segment again: the same trajectory, without all that only looks at it."""
    plan = plan_on_record(place)
    held_out = isinstance(config.data.eval, HeldOutConfig)  # it decides which rows are trained on
    sections: dict[str, Any] = {
        "run": {"storage": str(directory), "resume": "auto"},
        # The cache saves tokenizing. It is not trusted more than for the run itself: the samples' hashes are compared.
        "data": {
            "cache": config.data.cache.model_copy(update={"path": str(cache_of(config))}),
            **({} if held_out else {"eval": []}),
        },
        "checkpoint": {
            "storage": None,
            "every": None,
            "keep_last": None,
            "keep_every": None,
            "keep_best": 0,
            "best": None,
        },
        "export": {"at_end": False, "every": None, "push": None},
        # The schedule's length is in the checkpoint; from the beginning, only the plan says it.
        "optim": {"schedule_steps": config.optim.schedule_steps or plan.schedule_steps},
    }
    if segment.last < plan.steps or config.train.epochs is None:
        sections["train"] = {"max_steps": segment.last, "epochs": None}
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    tracking = TrackingConfig(console=config.tracking.console, mlflow=MlflowConfig(enabled=False))
    return config.model_copy(update={**changed, "eval": EvalConfig(), "tracking": tracking, "profile": ProfileConfig()})


def _take(checkpoint: CommittedCheckpoint, root: Path) -> None:
    """A committed checkpoint in another run's directory. Linked, where the file system can: they are large."""
    root.mkdir(parents=True, exist_ok=True)

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    shutil.copytree(checkpoint.path, root / checkpoint.name, copy_function=link)


def _steps(metrics: Path, segment: Segment) -> dict[int, dict[str, Any]]:
    """The lines of the segment's steps."""
    lines = (line for line in read_metrics(metrics) if line["kind"] == "step")
    return {
        line["trajectory"]["step"]: line for line in lines if segment.first < line["trajectory"]["step"] <= segment.last
    }


def _compare(
    found: Audit, config: FinetuneConfig, place: RunDir, again: RunDir, record: Mapping[int, Mapping[str, Any]]
) -> None:
    repeated = _steps(again.metrics, found.segment)
    found.there = _attempts(place, {line["attempt"] for line in record.values()})
    found.here = _attempts(again, {line["attempt"] for line in repeated.values()})[0]
    found.why_not_exact = _why_not_exact(found.here, found.there, deterministic=config.run.deterministic)
    precision = config.parallel.precision
    bounds = BOUNDS.get(precision, _OTHER_BOUNDS)
    for step in sorted(record):
        there, here = record[step]["trajectory"], repeated[step]["trajectory"]
        for key in (*EXACT, *bounds):
            off = 0.0 if there[key] == here[key] else _relative(there[key], here[key])
            if key in bounds:
                found.largest[key] = max(found.largest.get(key, 0.0), off)
            if off > (bounds.get(key, 0.0) if found.why_not_exact else 0.0):
                found.difference = (
                    f"step {step}: {key} is {there[key]} on record, and {here[key]} when it is trained again"
                )
                return
        found.steps += 1
    found.difference = _difference_of_ends(found, precision, again)


def _difference_of_ends(found: Audit, precision: str, again: RunDir) -> str | None:
    """What differs between the segment's last checkpoint and that of its repetition."""
    theirs = found.segment.after
    if theirs is None:
        return None
    mine = next(each for each in committed(again.checkpoints) if each.step == theirs.step)
    before, after = read_state(theirs), read_state(mine)
    for key in ("samples", "cursor", "skipped_in_row", "schedule_steps"):
        if getattr(before, key) != getattr(after, key):
            there, here = getattr(before, key), getattr(after, key)
            return f"the state of step {theirs.step}: {key} is {there}, and {here} when it is trained again"
    problems = []
    for each in compare_tensors(mine, theirs, found.segment.before):
        found.tensors += 1
        if isinstance(each, str):
            return each
        found.unequal += not each.equal
        if each.name.startswith(MODEL) and each.moved:
            found.weights = max(found.weights, each.most / each.moved)
        if problem := _problem(each, not found.why_not_exact, WEIGHTS.get(precision, _OTHER_WEIGHTS)):
            problems.append((each, problem))
    if not problems:
        return None
    worst, problem = max(problems, key=lambda pair: math.inf if math.isnan(pair[0].most) else pair[0].most)
    more = f" ({len(problems)} tensors differ)" if len(problems) > 1 else ""
    return f"the checkpoint of step {theirs.step}: {problem}{more}"


def _problem(each: TensorDifference, exact: bool, bound: float) -> str | None:
    """Why a tensor is not what the repetition has made of it."""
    if each.equal:
        return None
    # Moments are sums of what weights are made from, and say nothing of their own.
    if not exact and (not each.name.startswith(MODEL) or each.most <= bound * each.moved):
        return None
    here, there = each.values
    return f"{each.name}{list(each.place)} is {there!r}, and {here!r} when it is trained again"


def _relative(left: Any, right: Any) -> float:
    """The difference of two numbers, infinite for what is not a number."""
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in (left, right)):
        return 0.0 if str(left) == str(right) else math.inf
    return float(abs(left - right) / max(abs(left), abs(right)))


_MACHINE = ("world_size", "device", "threads", "versions")


def _attempts(place: RunDir, numbers: set[int]) -> list[dict[str, Any]]:
    """What is on record of the machines of these attempts."""
    events = [line for line in read_events(place.events) if line["event"] == ATTEMPT_STARTED]
    return [
        {"attempt": line["attempt"], **{key: line["fields"].get(key) for key in _MACHINE}}
        for line in events
        if line["attempt"] in numbers
    ]


def _why_not_exact(here: Mapping[str, Any], there: Sequence[Mapping[str, Any]], *, deterministic: bool) -> str:
    """Why the two need not be the same to the bit; empty if they must be."""
    if not there:
        return "the record does not say what the run was trained on"
    for attempt in there:
        for key in _MACHINE:
            words, number = key.replace("_", " "), attempt["attempt"]
            if attempt[key] is None:
                return f"the record does not say the {words} of attempt {number}"
            if attempt[key] != here[key]:
                return f"the {words} of attempt {number}: {attempt[key]}; here: {here[key]}"
    if not str(here["device"]).startswith("cpu") and not deterministic:
        return "on a GPU the order of additions is only fixed with run.deterministic=true"
    return ""


def report(found: Audit, name: str) -> Iterator[str]:
    """The outcome, for a person who has seen nothing of it, as Markdown."""
    segment = found.segment
    yield f"# Audit of {name}, steps {segment.first + 1} to {segment.last}"
    yield ""
    if found.difference is None:
        measure = "to the bit" if not found.why_not_exact else "within the bounds of another order of additions"
        yield f"**Passed**: trained again, it is the same {measure}."
    else:
        yield f"**Not the same.** First difference: {found.difference}"
    yield ""
    begin = "the beginning" if segment.before is None else f"the checkpoint of step {segment.first}"
    yield f"The segment was trained again from {begin}, under the run's own config and on its data, and compared:"
    yield ""
    yield f"- {found.steps} steps: samples, tokens, targets and learning rates, which any number of ranks has alike"
    for key, off in found.largest.items():
        yield f"- {key}: largest relative difference {off:.2e}"
    if found.tensors:
        unequal = f"{found.unequal} of them differ in a bit or more" if found.unequal else "all of them the same bits"
        yield f"- {found.tensors} tensors of the checkpoint of step {segment.last}: {unequal}"
        if found.unequal:
            yield f"- weights: off by {found.weights:.2e} of the way that their tensor has gone in the segment, at most"
    elif segment.after is None:
        yield f"- the checkpoint of step {segment.last} has not been kept: weights are not compared"
    if found.why_not_exact:
        yield f"- not to the bit, because {found.why_not_exact}"
    if found.here:
        yield ""
        yield "| | ranks | device | threads | versions |"
        yield "|---|---|---|---|---|"
        for attempt in found.there:
            yield _machine_row(f"the run, attempt {attempt['attempt']}", attempt)
        yield _machine_row("the audit", found.here)


def _machine_row(what: str, machine: Mapping[str, Any]) -> str:
    versions = machine["versions"] if isinstance(machine["versions"], dict) else {}
    named = ", ".join(f"{package} {version}" for package, version in versions.items()) or "not on record"
    shown = [machine[key] if machine[key] is not None else "not on record" for key in _MACHINE[:3]]
    return f"| {what} | {shown[0]} | {shown[1]} | {shown[2]} | {named} |"
