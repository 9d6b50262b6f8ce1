"""Find the first step at which two runs part, and what their directories tell about the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import RaytuneError, in_one_line
from raytune_fsdp.base.redaction import redact_shapes
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.plan.identity import changed_files
from raytune_fsdp.plan.run_dir import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    MODEL_FILES,
    PLAN_FILE,
    RECIPE_FILE,
)
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import each_event, raw_steps
from raytune_fsdp.record.lines import DIGESTS, read_line
from raytune_fsdp.record.report.ancestors import relation
from raytune_fsdp.record.report.history import check_run, config_of, json_map
from raytune_fsdp.record.report.surroundings import newest_checkpoint
from raytune_fsdp.record.tracker import flatten

ROUNDING = 1e-4
"""Relative. Two numbers of ranks, or two kernels, make a run differ by less in fp32 (docs/architecture.md, "How
exact")."""

_NUMBERS = {"loss", "grad_norm"}
_ROUNDED = {*_NUMBERS, *DIGESTS}
"""These are rounded, or tell of every rounding. All else in a trajectory is the same, bit by bit, at any number of
ranks."""
_SAMPLES = {"samples", "tokens", "target_tokens"}
_DECIDING: tuple[str, ...] = (
    "model.",
    "data.",
    "method.",
    "optim.",
    "train.",
    "parallel.precision",
    "run.seed",
    "run.exact",
)
_BESIDE = (
    "data.cache.", "data.eval", "data.bad_rows", "data.max_row_bytes", "train.log_every", "train.max_steps",
    "train.epochs", "optim.max_skipped", "model.attention", "model.loss", "model.tokenizer",
)  # fmt: skip
"""Settings that follow from others, or do not decide the trajectory."""
_FIRST_WEIGHTS: tuple[str, ...] = ("model.path", "method.adapter")
"""Settings that say where the first weights came from. Their content is not in an identity: a run that continues has
weights of its own."""
_RATE = ("optim.lr", "optim.schedule", "optim.warmup", "optim.min_lr", "plan.")


_COMPUTED = {
    names.KERNELS: {key: f"the kernel of {key}" for key in ("attention", "loss")}
    | {"blocks": "whether layers are compiled", "gradients": "the type in which gradients are added"}
    | {"mixers": "how state mixers get documents", "update": "whether updates are compiled"}
    | {"experts": "how experts are multiplied with", "scaling": "how a loss's gradients are scaled"}
    | {"decay": "what decays", "fixed": "the type of weights that are never trained"},
    names.ATTEMPT_STARTED: {"device": "the device", "threads": "the threads of a rank", "versions": "the versions"},
}
"""Fields of an attempt's events that decide rounding, each with a name in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something in which two runs differ, and which may have made them part."""

    kind: str
    """`data`, `config`, `plan`, `code`, `kernels` (device, threads and versions too) or `ranks`."""
    key: str
    values: tuple[Any, Any]
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What two trajectories have in common, and where they part."""

    equal: int
    """The number of steps on both records that are equal, before the first that is not."""
    step: int | None
    """The first step that differs; None if none does, as far as both records go."""
    keys: Mapping[str, tuple[Any, Any]]
    """The keys that differ in that step, in the order of the record, with both values."""
    rounding: bool
    """Whether the step differs by rounding only: samples and learning rate are the same, and the numbers agree as well
    as those of two numbers of ranks."""
    exact_step: int | None
    """The first step in which something differs that should be the same at any number of ranks, such as the samples."""
    exact_keys: Mapping[str, tuple[Any, Any]]
    """The keys of `exact_step` that differ although no number of ranks explains it, with both values."""
    causes: tuple[Cause, ...]
    """The likeliest first. Empty if nothing on record differs."""
    unknown: tuple[str, ...]
    """What could not be compared, in sentences."""
    related: tuple[str, ...] = ()
    """By which forks one comes from the other, or both from a third run, in sentences."""

    @property
    def words(self) -> str:
        """Where they part, in a sentence."""
        if self.step is None and not self.equal:
            return "No step is on record of both, so nothing was compared."
        if self.step is None:
            return f"The trajectories of all {self.equal:,} steps that both have are equal, bit by bit."
        before = f"{self.equal:,} steps are equal, bit by bit. " if self.equal else ""
        near = ", by no more than rounding" if self.rounding else ""
        words = f"{before}The trajectories part at step {self.step:,}{near}: {_both(self.keys)}."
        if self.exact_step is not None and self.exact_step != self.step:
            words += f" At step {self.exact_step:,} they part by more: {_both(self.exact_keys)}."
        return words


def difference(run_a: Path, run_b: Path) -> Difference:
    """Compare the records of two runs step by step, and their directories. UserError if one is no run directory."""
    for run in (run_a, run_b):
        check_run(run)
    records = raw_steps(run_a / METRICS_FILE), raw_steps(run_b / METRICS_FILE)
    equal, lines, alone = _first_difference(*records, lambda raw: raw)
    related = tuple(relation(run_a.absolute(), run_b.absolute()))
    unknown = [f"{alone:,} step(s) in between are on one record only, and were not compared."] if alone else []
    if lines is None:
        return Difference(
            equal=equal, step=None, keys={}, rounding=False, exact_step=None, exact_keys={}, causes=(),
            unknown=tuple(unknown), related=related,
        )  # fmt: skip
    keys = _differing(lines)
    near = all(math.isclose(*pair, rel_tol=ROUNDING) for key, pair in keys.items() if key in _NUMBERS)
    rounding = keys.keys() <= _ROUNDED and near
    exact: tuple[Line, Line] | None = lines
    if keys.keys() <= _ROUNDED:
        _, exact, _ = _first_difference(*records, _exact)
    exact_keys = {key: pair for key, pair in _differing(exact).items() if key not in _ROUNDED} if exact else {}
    facts = (_Facts(run_a, unknown), _Facts(run_b, unknown))
    causes = sorted(
        _causes(*facts, lines), key=lambda cause: _unlikely(cause, exact_keys or keys, rounding and not exact_keys)
    )
    return Difference(
        equal=equal,
        step=_place(lines[0]),
        keys=keys,
        rounding=rounding,
        exact_step=_place(exact[0]) if exact else None,
        exact_keys=exact_keys,
        causes=tuple(causes),
        unknown=tuple(unknown),
        related=related,
    )


Line = dict[str, Any]
Record = Iterator[tuple[bytes, bytes]]


def _first_difference(
    left: Record, right: Record, part: Callable[[bytes], bytes]
) -> tuple[int, tuple[Line, Line] | None, int]:
    """Return the number of equal steps, the lines of the first that are not equal, and the number of skipped steps.

    Skipped are steps on one record only, after the first that both have. `part` picks the bytes of a trajectory that
    are compared. Reads both records up to the difference, so that a second call goes on from there.
    """
    x, y = next(left, None), next(right, None)
    equal = alone = 0
    while x is not None and y is not None:
        if part(x[0]) == part(y[0]):
            equal += 1
            x, y = next(left, None), next(right, None)
            continue
        first, second = _step_line(x[1]), _step_line(y[1])
        place_a, place_b = _place(first), _place(second)
        if first is None or place_a < place_b:
            x, alone = next(left, None), alone + (equal > 0 and first is not None)
        elif second is None or place_b < place_a:
            y, alone = next(right, None), alone + (equal > 0 and second is not None)
        elif set(_differing((first, second))) - (_ROUNDED if part is _exact else set()):
            return equal, (first, second), alone
        else:  # equal, but written in another way
            equal += 1
            x, y = next(left, None), next(right, None)
    return equal, None, alone


def _exact(raw: bytes) -> bytes:
    """Return the bytes of a trajectory before the loss and after the gradient norm: they are not rounded."""
    return raw.partition(b', "loss": ')[0] + raw.rpartition(b', "lr": ')[2]


def _differing(lines: tuple[Line, Line]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ between two lines of a step, with both values. Digests count where both have them."""
    left, right = (line["trajectory"] for line in lines)
    keys = [key for key in left if key in right or key not in DIGESTS]
    return {key: (left[key], right.get(key)) for key in keys if not _same(left[key], right.get(key))}


def _step_line(raw: bytes) -> Line | None:
    line = read_line(raw)
    return line if line is not None and line["kind"] == "step" else None


def _place(line: Line | None) -> int:
    return -1 if line is None else int(line["trajectory"]["step"])


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _both(keys: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {a!r} and {b!r}" for key, (a, b) in keys.items())


class _Facts:
    """What decided a run's trajectory, read from its directory."""

    def __init__(self, run: Path, unknown: list[str]) -> None:
        self.run = run
        self.config: dict[str, Any] = _read(config_of, run / CONFIG_FILE, unknown)
        self.plan = _read(json_map, run / PLAN_FILE, unknown)
        self.version = _read(json_map, run / MODEL_FILES / RECIPE_FILE, unknown).get("version")
        self.state = _newest_state(run, unknown)

    def computed(self, attempt: object) -> dict[str, Any]:
        """Return what an attempt computed with (kernels, versions) and on (device, threads)."""
        found: dict[str, Any] = {}
        for each in each_event(self.run / EVENTS_FILE):
            of_event = _COMPUTED.get(each["event"], {}) if each["attempt"] == attempt else {}
            found |= {words: each["fields"][key] for key, words in of_event.items() if key in each["fields"]}
        return found


def _newest_state(run: Path, unknown: list[str]) -> RunState | None:
    try:
        newest, why = newest_checkpoint(run)
        if newest is not None:
            return read_state(newest)
    except (RaytuneError, OSError, ValueError) as error:
        why = in_one_line(error)
    unknown.append(f"Hashes of the data of {run} are not at hand ({why}), so only the configs are compared.")
    return None


def _causes(a: _Facts, b: _Facts, lines: tuple[Line, Line]) -> Iterator[Cause]:
    """Yield what differs in config, data and code, and in how the step was computed, which decides rounding only."""
    of_config = _DECIDING
    if a.state is not None and b.state is not None:  # identities have all that decides a trajectory: content, not paths
        of_config = _FIRST_WEIGHTS
        for key in sorted({*a.state.identity, *b.state.identity} - {"run.fork"}):  # what it changed is there, too
            one, other = a.state.identity.get(key), b.state.identity.get(key)
            kind = "data" if key.startswith("data.") else "config"
            if one != other and key in a.state.files and key in b.state.files:
                words = changed_files(one, other, a.state.files[key], b.state.files[key])  # type: ignore[arg-type]
                yield Cause(kind=kind, key=key, values=(one, other), words=f"{key}: {words}")
            elif one != other:
                yield _cause(kind, key, one, other)
    left, right = _settings(a.config, of_config), _settings(b.config, of_config)
    for key in sorted({*left, *right}):
        if left.get(key) != right.get(key):
            yield _cause("data" if key.startswith("data.") else "config", key, left.get(key), right.get(key))
    for key in ("schedule_steps", "warmup_steps"):
        if a.plan.get(key) != b.plan.get(key):
            yield _cause("plan", f"plan.{key}", a.plan.get(key), b.plan.get(key))
    if a.version != b.version:
        yield _cause("code", "the version of raytune_fsdp", a.version, b.version)
    sizes = [line.get("world_size") for line in lines]
    exact = all(_settings(each.config, ("run.exact",)).get("run.exact") is True for each in (a, b))
    if sizes[0] != sizes[1] and not exact:  # with run.exact it decides nothing
        yield _cause("ranks", "the number of ranks", *sizes)
    left, right = a.computed(lines[0].get("attempt")), b.computed(lines[1].get("attempt"))
    for words in sorted(words for words in left.keys() & right.keys() if left[words] != right[words]):
        yield _cause("kernels", words, left[words], right[words])


def _unlikely(cause: Cause, keys: Mapping[str, Any], rounding: bool) -> int:
    """Return a number that is the higher, the less a cause explains what differs. Sorting keeps the order of equals."""
    machine = cause.kind in ("ranks", "kernels", "code")
    if rounding or machine:
        return 0 if rounding and machine else 3
    about_data = cause.kind == "data" or cause.key in ("run.seed", "train.global_batch")
    if keys.keys() & _SAMPLES:
        return 0 if about_data else 1
    if "lr" in keys:
        return 0 if cause.key.startswith(_RATE) else 1
    return 2 if about_data or cause.key.startswith(_RATE) else 0


def _settings(config: Mapping[str, Any], of: tuple[str, ...]) -> dict[str, object]:
    return {key: value for key, value in flatten(config).items() if key.startswith(of) and not key.startswith(_BESIDE)}


def _cause(kind: str, key: str, a: Any, b: Any) -> Cause:
    values = redact_shapes([a, b])
    return Cause(kind=kind, key=key, values=(a, b), words=f"{key}: {_short(values[0])} and {_short(values[1])}")


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:100]} … {text[-100:]}"


def _read(read: Any, path: Path, unknown: list[str]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read(path)
    except FileNotFoundError:  # an older version did not write it
        return {}
    except (OSError, ValueError) as error:
        unknown.append(f"{path} is left out: {in_one_line(error)}.")
        return {}
    return found
