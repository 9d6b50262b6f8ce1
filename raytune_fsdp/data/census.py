"""Count the data before training: every window is built once, and stays in the cache for the run.

403 M tokens (a JSON Lines file of 2 GB) took 110 s in one process on two cores, and streaming them afterwards 10 s.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from raytune_fsdp.base.batch import GROUP_COLUMNS, Cursor, Progress, Role
from raytune_fsdp.base.errors import ConfigError, DataError
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.counts import Census, DatasetCount, GroupsOfSteps, SkippedRow, WindowCounts

Places = Sequence[tuple[int, int]]
"""Pairs of epoch and window."""

Builder = Callable[[Windows, Places], Iterable[tuple[WindowCounts, bool]]]
"""A function that yields the counts of these windows in order, and whether each had to be tokenized."""

# The most skipped rows that are kept: they go into the census file and into every process's copy of the census.
_LISTED_ROWS = 10_000
# Epochs that are counted one by one. All counts are written again after each, so the work grows with their square.
_MAX_EPOCHS = 10_000


def build_here(windows: Windows, places: Places) -> Iterator[tuple[WindowCounts, bool]]:
    """Build windows in this process, one after the other."""
    for epoch, k in places:
        # must_keep: a window that was not cached would be tokenized a second time by the run.
        window, built = windows.get(epoch, k, must_keep=True)
        yield window.counts, built


def different_epochs(windows: Windows, epochs: float) -> int:
    """Return how many epochs have to be counted: one, if all have the same windows."""
    distinct = 1 if windows.repeats else math.ceil(Fraction(str(epochs)))
    if distinct > _MAX_EPOCHS:
        raise ConfigError(
            f"train.epochs={epochs:g}: every epoch has other windows (data.reshuffle, data.train.*.weight), so each is "
            f"counted before training, at most {_MAX_EPOCHS:,}: set train.max_steps, which needs no count, or "
            "data.reshuffle=windows"
        )
    return distinct


def census(
    windows: Windows,
    epochs: float = 1.0,
    *,
    progress: Progress | None = None,
    build: Builder = build_here,
) -> Census:
    """Count `epochs` epochs. Reuses what an earlier census counted or built. Raises RowError for bad rows."""
    known = windows.cache.read_census()
    distinct = different_epochs(windows, epochs)
    counted = [_restore(windows, known.get(str(epoch))) for epoch in range(distinct)]
    places = [(e, k) for e, found in enumerate(counted) if found is None for k in range(windows.count(e))]
    results = iter(build(windows, places)) if places else iter(())
    done = 0
    for epoch, found in enumerate(counted):
        if found is not None:
            continue
        datasets = [DatasetCount() for _ in windows.names]
        skipped: list[SkippedRow] = []
        samples = built = 0
        for _ in range(windows.count(epoch)):
            counts, tokenized = next(results)
            for dataset, count in zip(datasets, counts.datasets, strict=True):
                dataset.add(count)
            skipped += counts.skipped[: _LISTED_ROWS - len(skipped)]
            samples += counts.samples
            built += tokenized
            done += 1
            if progress is not None:
                progress("counting the data", done, len(places))
        counted[epoch] = Census(
            seq_len=windows.seq_len,
            epochs=(samples,),
            windows=windows.count(epoch),
            names=windows.names,
            datasets=tuple(datasets),
            skipped=tuple(skipped),
            built=built,
        )
        # After every epoch, so that a census that was killed goes on from there.
        windows.cache.write_census({str(e): c.to_json() for e, c in enumerate(counted) if c is not None})
    total = _together(windows, [count for count in counted if count is not None])
    for name, source, count in zip(windows.names, windows.sources, total.datasets, strict=True):
        if count.rows and not count.documents:
            reasons = ", ".join(f"{many} {reason}" for reason, many in sorted(count.dropped.items()))
            raise DataError(
                f"dataset {name!r} ({source.label}): none of its {len(source)} rows can be used ({reasons}); "
                f"raise data.seq_len={windows.seq_len}, correct the rows, or remove the dataset"
            )
    return total


def answers_of(windows: Windows, progress: Progress | None, build: Builder = build_here) -> tuple[int, int]:
    """Return how many desirable and undesirable answers the first epoch has. Its windows stay in the cache."""
    census(windows, progress=progress, build=build)
    roles = Counter[float]()
    for k in range(windows.count(0)):
        columns = windows.get(0, k)[0].samples.columns
        roles.update([] if columns is None else columns[:, GROUP_COLUMNS.index("role")].tolist())
    return roles[Role.DESIRABLE], roles[Role.UNDESIRABLE]


def classes_of(windows: Windows) -> dict[str, int]:
    """Return how many documents of the first epoch each class has; empty if there are none. Reads every window."""
    scoring, many = windows.scoring, Counter[float]()
    if scoring is None or windows.kind != "score" or scoring.outputs == 1:
        return {}
    for k in range(windows.count(0)):
        columns = windows.get(0, k)[0].samples.columns
        many.update([] if columns is None else columns[:, GROUP_COLUMNS.index("margin")].tolist())
    names = scoring.labels or tuple(map(str, range(scoring.outputs)))
    return {name: many[number] for number, name in enumerate(names)}


def _restore(windows: Windows, written: str | None) -> Census | None:
    """Return the counts of an epoch from an earlier census; None if there are none."""
    if written is None:
        return None
    if any(count["cut"] and "without_targets" not in count for count in json.loads(written)["datasets"]):
        return None  # from before pieces without targets were counted: count again, from the windows in the cache
    found = replace(Census.from_json(written), names=windows.names, built=0)
    windows.check_skipped(found.skipped)
    return found


def _together(windows: Windows, epochs: Sequence[Census]) -> Census:
    datasets = [DatasetCount() for _ in windows.names]
    for epoch in epochs:
        for dataset, count in zip(datasets, epoch.datasets, strict=True):
            dataset.add(count)
    return Census(
        seq_len=windows.seq_len,
        epochs=tuple(samples for epoch in epochs for samples in epoch.epochs),
        windows=sum(epoch.windows for epoch in epochs),
        names=windows.names,
        datasets=tuple(datasets),
        skipped=tuple(row for epoch in epochs for row in epoch.skipped)[:_LISTED_ROWS],
        built=sum(epoch.built for epoch in epochs),
    )


def groups_of_steps(windows: Windows, seed: int, global_batch: int) -> GroupsOfSteps | None:
    """Return how many groups the steps of the first epoch have; None if documents stand alone. Reads every window."""
    if windows.kind is None:
        return None
    stream, found = Stream(windows, seed=seed), [np.zeros(0, dtype=np.int64)]
    for place in range(windows.count(0)):
        k = stream.window_at(0, place)
        own = windows.get(0, k)[0].samples.groups
        inside = stream.order(len(own), "samples", 0, k)
        found.append(own[[inside(index) for index in range(len(own))]])
    of_samples = np.concatenate(found)
    whole = len(of_samples) - len(of_samples) % global_batch
    steps = of_samples[:whole].reshape(-1, global_batch).sum(axis=1)
    if not len(steps):
        return GroupsOfSteps(mean=float(of_samples.mean()) * global_batch if len(of_samples) else 0.0)
    return GroupsOfSteps(mean=float(steps.mean()), least=int(steps.min()), most=int(steps.max()))


# The rows that `data.bad_rows=skip` leaves out. Each is reported once: when the stream reaches its window.

_ROWS_PER_EVENT = 100  # an event is one line of events.jsonl


class SkippedRows:
    """Reports the skipped rows of each window once, when the stream enters it."""

    def __init__(self, stream: Stream, cursor: Cursor, *, counted: bool) -> None:
        """`counted`: a census has reported all rows already."""
        self._stream = stream
        self._next = (cursor.epoch, cursor.window + (cursor.index > 0))
        self._silent = counted or stream.windows.data.bad_rows == "error"

    def up_to(self, cursor: Cursor) -> Iterator[Mapping[str, Any]]:
        """Yield the fields of events for the windows entered since the last call."""
        windows = self._stream.windows
        while not self._silent and self._next < (cursor.epoch, cursor.window + (cursor.index > 0)):
            epoch, place = self._next
            if windows.repeats and epoch:
                self._silent = True  # the first epoch had every window
            elif place >= windows.count(epoch):
                self._next = (epoch + 1, 0)
            else:
                self._next = (epoch, place + 1)
                counts = windows.counts(epoch, self._stream.window_at(epoch, place))
                if counts is not None:
                    yield from events_of_rows(counts.skipped)


def events_of_rows(rows: Sequence[SkippedRow]) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of the events that list these rows."""
    for first in range(0, len(rows), _ROWS_PER_EVENT):
        some = rows[first : first + _ROWS_PER_EVENT]
        yield {
            "reasons": dict(Counter(row.reason for row in some)),
            "rows": [{"where": row.where, "reason": row.reason, "message": row.message} for row in some],
        }
