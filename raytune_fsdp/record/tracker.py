"""The interface of a tracker, which does nothing by itself, and several trackers as one.

Rank 0 calls a tracker, from one thread: `start` once, then `steps`, `evaluation`, `event` and `state` in any order, and
`finish` at the end. Steps arrive in order, possibly many at once, as scalars are fetched from the device together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from raytune_fsdp.base.errors import RaytuneError, TrainingError, in_one_line
from raytune_fsdp.base.measured import ParameterCount, StepMetrics
from raytune_fsdp.record.lineage import ForkedFrom

logger = logging.getLogger(__name__)

Status = Literal["finished", "failed", "interrupted", "handed_over"]
"""How an attempt ended. `handed_over`: another attempt goes on with the run, of the same command or of one that has
taken over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedData:
    """A dataset of the run."""

    name: str
    digest: str
    """A hash of its files' content and of which rows are used; at most 36 characters."""
    kind: str
    """The kind of its place, as MLflow names it: local, s3, hugging_face, …"""
    place: Mapping[str, object]
    rows: int
    purpose: Literal["training", "evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known when an attempt starts."""

    name: str
    """`run.name`."""
    attempt: int
    """The number of the attempt, from 1."""
    resumed_from: int = 0
    """Step of the checkpoint that the attempt continues from; 0 if it starts from the beginning."""
    begins_after: int = 0
    """Step of the parent's checkpoint with which a fork began: the record begins with the next one."""
    forked_from: ForkedFrom | None = None
    """What is on record of that parent."""
    total_steps: int | None = None
    """Step at which the run ends."""
    config: str = ""
    """The config as YAML text."""
    plan: Mapping[str, object] = field(default_factory=dict)
    """The plan, ready for JSON."""
    params: Mapping[str, object] = field(default_factory=dict)
    """The settings that differ from their defaults, with dotted keys."""
    datasets: Sequence[UsedData] = ()
    commit: str | None = None
    """The git commit of the directory in which the command was started; None where there is none."""
    state: Mapping[str, str] = field(default_factory=dict)
    """What `Tracker.state` returned for the checkpoint that the attempt continues from."""
    parameters: ParameterCount | None = None
    """The size of the network."""
    over: bool = False
    """No step will follow: the tracker only sends what its receiver lacks, and how the run ended."""
    committed: int | None = None
    """Step of the newest checkpoint, if that is not `resumed_from`."""


class Tracker:
    """Tracks nothing by itself: for every rank but 0."""

    def start(self, run: RunStart) -> None:
        """Begin an attempt, before its first step."""

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        """Take finished optimizer steps, in order."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Take the result of an evaluation after `step`, under keys such as `eval/<dataset>/loss`."""

    def event(self, name: str, /, **fields: object) -> None:
        """Take anything else worth knowing; the names in use are in `record.names`."""

    def state(self) -> dict[str, str]:
        """Return what a checkpoint must hold so that a run resumed from it continues here. May wait a bounded time."""
        return {}

    def sync(self) -> None:
        """Return when everything reported so far is on storage. May be called from another thread."""

    def finish(self, status: Status) -> None:
        """End the attempt. May wait for a bounded time; a second call does nothing."""


class Composite(Tracker):
    """Several trackers as one: each is called in turn, and a failure of one does not reach the others or training.

    Errors that this package raises on purpose do reach training, after every tracker has been called: a run directory
    that cannot be written (`TrainingError`), and an interruption that happened to arrive here. So does whatever
    `record` raises, which is called first: a run is not trained without its record.
    """

    def __init__(self, trackers: Sequence[Tracker], *, record: Tracker | None = None) -> None:
        self._record = record
        self._trackers = (*([record] if record is not None else []), *trackers)
        self._failed: set[int] = set()

    def start(self, run: RunStart) -> None:
        self._each(lambda tracker: tracker.start(run))

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        self._each(lambda tracker: tracker.steps(metrics, world_size, attempt))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.evaluation(step, values))

    def event(self, name: str, /, **fields: object) -> None:
        self._each(lambda tracker: tracker.event(name, **fields))

    def state(self) -> dict[str, str]:
        merged: dict[str, str] = {}
        self._each(lambda tracker: merged.update(tracker.state()))
        return merged

    def sync(self) -> None:
        self._each(lambda tracker: tracker.sync())

    def finish(self, status: Status) -> None:
        self._each(lambda tracker: tracker.finish(status))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        ours: RaytuneError | None = None
        for index, tracker in enumerate(self._trackers):
            try:
                call(tracker)
            except RaytuneError as error:
                ours = ours or error
            except Exception as error:  # to training, a tracker is foreign code that may raise anything
                if tracker is self._record:
                    ours = TrainingError(
                        f"the record of the run cannot be kept, so training stops: {in_one_line(error)}. The same "
                        "command continues from the newest checkpoint"
                    )
                    ours.__cause__ = error
                elif index not in self._failed:
                    self._failed.add(index)
                    logger.warning(
                        "%s failed; training continues, later failures are not reported", type(tracker).__name__,
                        exc_info=True,
                    )  # fmt: skip
        if ours is not None:
            raise ours


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Turn nested mappings and lists into one mapping with dotted keys: `data.train.0.path`. Empty ones stay."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple) and value:
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
