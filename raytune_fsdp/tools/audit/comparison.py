"""Compare a segment's repetition with the record of the run, and with its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.checkpoint.contents import MODEL
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import each_event
from raytune_fsdp.record.lines import DIGESTS
from raytune_fsdp.record.names import ATTEMPT_STARTED, BITS_MAY_DIFFER, KERNELS, SETTINGS_CHANGED
from raytune_fsdp.step.accumulation import AS_WEIGHTS
from raytune_fsdp.tools.audit.segment import Segment, steps_of

EXACT = ("samples", "tokens", "target_tokens", "lr")
"""The values of a step that are the same at any world size, to the bit."""

BOUNDS = {"fp64": {"loss": 1e-8, "grad_norm": 1e-6}, "fp32": {"loss": 1e-5, "grad_norm": 1e-4}}
"""Other world sizes add in another order; tests/distributed/test_exact.py holds them to these bounds."""
_OTHER_BOUNDS = {"loss": 1e-2, "grad_norm": 1e-1}
"""Bounds for 16 bits, which do not always hold: the number of ranks decides what is rounded when."""
WEIGHTS = {"fp64": 1e-4, "fp32": 5e-2}
"""The largest allowed difference of a weight, relative to the largest change of a number in its tensor."""
_OTHER_WEIGHTS = 0.5


@dataclass(slots=True, kw_only=True)
class Audit:
    """The outcome of an audit."""

    segment: Segment
    use_cache: bool = False
    """Whether tokenized rows were taken from the run's own cache."""
    why_not_exact: str = ""
    """Why the two need not be the same to the bit; empty if they must be."""
    here: Mapping[str, Any] = field(default_factory=dict)
    """Where the segment was trained again: number of ranks, device, threads, versions."""
    there: Sequence[Mapping[str, Any]] = ()
    """Where the run was trained, by attempt."""
    largest: dict[str, float] = field(default_factory=dict)
    """The largest relative difference of each number, over all steps."""
    steps: int = 0
    """How many steps were compared."""
    tensors: int = 0
    """How many tensors were compared."""
    unequal: int = 0
    """How many of the tensors are not the same to the bit."""
    weights: float = 0.0
    """The largest difference of a weight, relative to the largest change of a number in its tensor."""
    difference: str | None = None
    """The first thing that differs; None if the run has passed."""


def compare(
    found: Audit, config: FinetuneConfig, place: RunDir, again: RunDir, record: Mapping[int, Mapping[str, Any]]
) -> None:
    """Compare the repetition with the record, and fill in `found`. Both have all of the segment's steps."""
    repeated = steps_of(again.metrics, found.segment)
    found.there = _attempts(place, {_attempt_of(line) for line in record.values()})
    found.here = _attempts(again, {_attempt_of(line) for line in repeated.values()})[0]
    found.why_not_exact = _why_not_exact(found, config, place)
    precision = config.parallel.precision
    bounds = BOUNDS.get(precision, _OTHER_BOUNDS)
    for step in sorted(record):
        there, here = record[step]["trajectory"], repeated[step]["trajectory"]
        digests = [key for key in DIGESTS if key in there and key in here and not found.why_not_exact]
        for key in (*EXACT, *bounds, *digests):
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


def _attempt_of(line: Mapping[str, Any]) -> int:
    """Return the attempt in which a step was trained; 0 if the line does not say."""
    number = line.get("attempt")
    return number if is_count(number) else 0


def _difference_of_ends(found: Audit, precision: str, again: RunDir) -> str | None:
    """Compare the segment's last checkpoint with that of its repetition; return what differs, or None."""
    theirs = found.segment.after
    if theirs is None:
        return None
    mine = next(each for each in committed(again.checkpoints) if each.step == theirs.step)
    before, after = _decisive(read_state(theirs)), _decisive(read_state(mine))
    for key, there in before.items():
        # Whether a gradient is too large for fp16 may depend on the last bit.
        if there != after[key] and not (found.why_not_exact and key in ("loss_scale", "good_steps")):
            return f"the state of step {theirs.step}: {key} is {there}, and {after[key]} when it is trained again"
    problems = []
    for each in compare_tensors(mine, theirs, found.segment.before):
        found.tensors += 1
        if isinstance(each, str):
            return each
        found.unequal += not each.equal
        if each.name.startswith(MODEL) and each.moved:
            off = each.most / each.moved
            found.weights = math.nan if math.isnan(off + found.weights) else max(found.weights, off)
        if problem := _problem(each, not found.why_not_exact, WEIGHTS.get(precision, _OTHER_WEIGHTS)):
            problems.append((each, problem))
    if not problems:
        return None
    worst, problem = max(problems, key=lambda pair: math.inf if math.isnan(pair[0].most) else pair[0].most)
    more = f" ({len(problems)} tensors differ)" if len(problems) > 1 else ""
    return f"the checkpoint of step {theirs.step}: {problem}{more}"


def _decisive(state: RunState) -> dict[str, Any]:
    """Return the parts of a state that decide how the run goes on, except its identity, which was compared before."""
    keys = ("samples", "cursor", "skipped_in_row", "schedule_steps", "loss_scale", "good_steps")
    base = None if state.base is None else {key: state.base.get(key) for key in ("files", "added")}
    return {**{key: getattr(state, key) for key in keys}, "base": base}


def _problem(each: TensorDifference, exact: bool, bound: float) -> str | None:
    """Return a sentence about a tensor that differs too much; None if it does not."""
    if each.equal:
        return None
    # Moments are sums of the same gradients as the weights, and would add no evidence of their own.
    if not exact and (not each.name.startswith(MODEL) or each.most <= bound * each.moved):
        return None
    here, there = each.values
    return f"{each.name}{list(each.place)} is {there!r}, and {here!r} when it is trained again"


def _relative(left: Any, right: Any) -> float:
    """Return the relative difference of two numbers; infinite if they differ and one is not a finite number."""
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in (left, right)):
        return 0.0 if str(left) == str(right) else math.inf
    return float(abs(left - right) / max(abs(left), abs(right)))


MACHINE = ("world_size", "device", "threads", "versions")
"""The fields on record that say where an attempt was trained."""
_SPREAD = ("replicas", "shard_size", "sequence", "tensor")
_KERNELS = ("attention", "loss", "blocks")
_IF_ANY = ("mixers", "experts", "instructions", "packages")
"""On record for packed hybrids, for experts, of CPUs, and where there are some; older versions did not record them."""
_GRADIENTS = "gradients"
"""On record for runs in bf16_pure. Older versions added gradients in the type of the weights and did not record it."""
_DECIDE_BITS = ("parallel.", "run.deterministic", "model.attention", "model.loss", "train.micro_batch")
"""Settings that may change within a run, and decide the order of additions."""
_ANY_IF_EXACT = ("parallel.reduce", "parallel.strategy")


def _attempts(place: RunDir, numbers: set[int]) -> list[dict[str, Any]]:
    known: dict[int, dict[str, Any]] = {number: {"attempt": number} for number in sorted(numbers)}
    for line in each_event(place.events):
        keys = {ATTEMPT_STARTED: (*MACHINE, *_SPREAD), KERNELS: (*_KERNELS, _GRADIENTS)}.get(line["event"], ())
        if keys and line["attempt"] in known:
            # These two are recorded only if they are more than 1.
            found = {key: line["fields"].get(key, 1 if key in ("sequence", "tensor") else None) for key in keys}
            there = {key: line["fields"][key] for key in _IF_ANY if key in line["fields"]}
            known[line["attempt"]].update({**found, **there})
    return list(known.values())


def _why_not_exact(found: Audit, config: FinetuneConfig, place: RunDir) -> str:
    """Return why the two need not be the same to the bit; an empty text if they must be."""
    here = found.here
    any_ranks = ("world_size", "replicas", "shard_size") if config.run.exact else ()
    for attempt in found.there:
        for key in (*MACHINE, *_SPREAD, *_KERNELS, *_IF_ANY):
            words, number = key.replace("_", " "), attempt["attempt"]
            if key in any_ranks or (key in _IF_ANY and key not in attempt):
                continue
            if attempt.get(key) is None:
                return f"the record does not say the {words} of attempt {number}"
            if attempt[key] != here.get(key):
                return f"the {words} of attempt {number}: {attempt[key]}; here: {here.get(key)}"
        added = attempt.get(_GRADIENTS) or (here.get(_GRADIENTS) and AS_WEIGHTS)
        if added != here.get(_GRADIENTS):
            return f"the type in which attempt {number} added gradients: {added}; here: {here.get(_GRADIENTS)}"
    attempts = [attempt["attempt"] for attempt in found.there]
    first = min(attempts)
    for line in each_event(place.events):
        if line["event"] == BITS_MAY_DIFFER and line["fields"].get("among_ranks") and line["attempt"] in attempts:
            return f"in attempt {line['attempt']} {line['fields'].get('because')}"
        # The run's config is that of its newest attempt, so earlier attempts may have had other settings.
        changed = line["fields"] if line["event"] == SETTINGS_CHANGED and line["attempt"] > first else {}
        decisive = sorted(key for key in changed if key.startswith(_DECIDE_BITS))
        if config.run.exact:  # which has the same bits with either
            decisive = [key for key in decisive if key not in _ANY_IF_EXACT]
        if decisive:
            return f"{decisive[0]} was changed in attempt {line['attempt']}"
    if not str(here["device"]).startswith("cpu") and not config.run.repeats_bits:
        return "on a GPU the order of additions is only fixed with run.deterministic=true"
    return ""


# Compare the tensors of two checkpoints number by number. This needs neither ranks nor the network.

_AT_ONCE = 4 << 20  # numbers: as doubles, three tensors of them take 100 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How a tensor differs between two checkpoints."""

    name: str
    most: float
    """The largest difference of a number; NaN if one of the two is not finite. 0 with other bits: -0 and 0."""
    equal: bool
    """Whether all bits are the same."""
    place: tuple[int, ...]
    """The index of the largest difference."""
    values: tuple[float, float]
    """The two numbers there."""
    moved: float
    """The largest change of a number since an earlier checkpoint; without one, the largest number."""


def compare_tensors(
    first: CommittedCheckpoint, second: CommittedCheckpoint, before: CommittedCheckpoint | None
) -> Iterator[TensorDifference | str]:
    """Yield the difference of every tensor, or a sentence if only one of them has it, or its shape or type differs."""
    left, right = CheckpointWeights(first, ""), CheckpointWeights(second, "")
    start = None if before is None else CheckpointWeights(before, "")
    shapes, others = left.shapes(), right.shapes()
    for name in sorted(shapes.keys() | others.keys()):
        if name not in shapes or name not in others:
            yield f"{name} is only in {(first if name in shapes else second).path}"
        elif (shapes[name], left.dtypes()[name]) != (others[name], right.dtypes()[name]):
            yield (
                f"{name} is {list(shapes[name])} {left.dtypes()[name]} in {first.path}, "
                f"{list(others[name])} {right.dtypes()[name]} in {second.path}"
            )
        else:
            yield _compared(name, left, right, start if start is not None and name in start.shapes() else None)


def _compared(
    name: str, left: CheckpointWeights, right: CheckpointWeights, start: CheckpointWeights | None
) -> TensorDifference:
    shape = left.shapes()[name]
    rows = shape[0] if shape else 1
    step = max(1, _AT_ONCE // max(1, math.prod(shape[1:])))
    most, place, values, equal, moved = 0.0, (0,) * len(shape), (0.0, 0.0), True, 0.0
    for first in range(0, rows, step):
        last = min(rows, first + step)
        mine, theirs = left.read(name, first, last), right.read(name, first, last)
        wide = mine.double()
        way = wide if start is None else wide - start.read(name, first, last).double()
        moved = max(moved, _largest(way.abs())[0])
        if torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
            continue
        found, at = _largest((wide - theirs.double()).abs())
        if equal or not (math.isnan(most) or found <= most):  # NaN counts as the largest of all
            index = [int(each) for each in torch.unravel_index(torch.tensor(at), mine.shape)]
            values = float(wide[tuple(index)]), float(theirs[tuple(index)])
            place = (index[0] + first, *index[1:]) if shape else ()
            most = found
        equal = False
    return TensorDifference(name=name, most=most, equal=equal, place=place, values=values, moved=moved)


def _largest(values: torch.Tensor) -> tuple[float, int]:
    """Return the largest number and its place; a NaN is larger than all."""
    at = int(values.reshape(-1).argmax())
    return float(values.reshape(-1)[at]), at
