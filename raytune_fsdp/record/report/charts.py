"""Prepare the curves of one run or several for the page's script: chosen, named and thinned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from raytune_fsdp.record import names
from raytune_fsdp.record.report.curves import SMOOTH_FROM_STEPS, smoothed
from raytune_fsdp.record.report.history import History, Numbers
from raytune_fsdp.record.report.thin import Buckets, band, buckets, number, thinned

Series = dict[str, Any]
"""Has `name`; `axis`, the run; `colour`, a number; and either `mid` with `low` and `high`, by bucket of the axis, or
`points`, each with step, seconds and value. `smooth`: a line through `mid`."""
_MOST_POINTS, _MOST_OF_NODES = 2000, 400
_COLOURS = 8
_MOST_SERIES = 16
"""The most series of a chart: nobody can distinguish more lines."""


class Run:
    """A run on a page; `index` is its place among the runs that are compared."""

    def __init__(self, history: History, index: int, *, alone: bool) -> None:
        self.history = history
        self.index = index
        self.into: Buckets = buckets(len(history.steps))
        self._alone = alone

    def axis(self) -> dict[str, Any]:
        """Return the first and the last step of each bucket, and the seconds from the run's beginning to its end."""
        if len(self.into) < 2:
            return {"from": [], "to": [], "time": None}
        last = self.into[1:] - 1
        # Rounded first: rounding makes infinities of the largest numbers.
        with np.errstate(over="ignore"):
            seconds = np.round(self.history.time - self.history.start, 1)
        return {
            "from": self.history.steps[self.into[:-1]].astype(np.int64).tolist(),
            "to": self.history.steps[last].astype(np.int64).tolist(),
            "time": seconds[last].tolist() if np.isfinite(seconds).all() else None,
        }

    def name(self, what: str) -> str:
        """Name a series: by what it shows, or, if runs are compared, by the run."""
        if self._alone:
            return what
        return f"{self.history.name}: {what}" if what else self.history.name

    def colour(self, number: int = 0) -> int:
        return (number if self._alone else self.index) % _COLOURS

    def series(self, what: str, values: Numbers, colour: int = 0) -> Series:
        return self._series(what, colour, thinned(values, self.into))

    def column(self, what: str, name: str, colour: int = 0, scale: float = 1.0) -> Iterator[Series]:
        if self.history.has(name):
            yield self.series(what, self.history.columns[name] * scale, colour)

    def ranks(self, what: str, name: str, colour: int = 0) -> Iterator[Series]:
        """Yield a band from the fastest rank to the slowest, with the median between them."""
        if self.history.has(f"{name}.1"):
            low, mid, high = (self.history.columns[f"{name}.{i}"] for i in range(3))
            yield self._series(what, colour, band(low, mid, high, self.into))

    def loss(self) -> Iterator[Series]:
        loss = self.history.columns["loss"]
        if not len(loss):
            return
        found = self.series("train" if self._alone else "", loss)
        if len(loss) >= SMOOTH_FROM_STEPS:
            # Smoothed as in loss.png: over about 2 % of the run.
            line = np.array(smoothed(loss.tolist(), len(loss) // 100))
            found["smooth"] = thinned(line, self.into)["mid"]
        yield found

    def evaluations(
        self, wanted: str, *, colours_from: int = 0, of: str | None = None, scale: float = 1.0
    ) -> Iterator[Series]:
        """Yield the points of one metric, such as `loss`, for every dataset; `of`: for those of groups, scores or
        tokens."""
        measured = self.history.evaluations
        ends = [
            name for name in measured
            if name.endswith(f"/{wanted}") and of in (None, names.measured_of(name, measured))
        ]  # fmt: skip
        for place, name in enumerate(ends, start=colours_from):
            what = name.removesuffix(f"/{wanted}").replace("/", " ", 1)
            points = [(step, value * scale, time) for step, value, time in measured[name]]
            yield self._points(what, points, place)

    def metric(self, name: str) -> Iterator[Series]:
        if name in self.history.evaluations:
            yield self._points("", self.history.evaluations[name])

    def nodes(self, figure: str, scale: float = 1.0) -> Iterator[Series]:
        """Yield a figure of the nodes, which one step of every ten seconds has: of one node, or of three of them."""
        known = np.flatnonzero(np.isfinite(self.history.columns[f"{figure}.1"]))
        three = [self.history.columns[f"{figure}.{i}"][known] * scale for i in range(3)]
        steps, times = self.history.steps[known].astype(np.int64).tolist(), self.history.time[known].tolist()
        alike = all(np.array_equal(three[1], each) for each in three)
        for name, index in (("", 1),) if alike else (("least", 0), ("median", 1), ("most", 2)):
            if steps:
                points = [*zip(steps, three[index].tolist(), times, strict=True)]
                yield self._points(name, points, 0 if alike else index, most=_MOST_OF_NODES)

    def _points(
        self, what: str, points: Sequence[tuple[int, float, float]], colour: int = 0, most: int = _MOST_POINTS
    ) -> Series:
        drawn: list[list[Any]] = []
        for step, value, time in _some(points, most):
            seconds = time - self.history.start
            drawn.append([step, round(max(0.0, seconds), 1) if math.isfinite(seconds) else None, number(value)])
        return {"name": self.name(what), "axis": self.index, "colour": self.colour(colour), "points": drawn}

    def _series(self, what: str, colour: int, values: Mapping[str, Any]) -> Series:
        return {"name": self.name(what), "axis": self.index, "colour": self.colour(colour), **values}


def _datasets(run: Run) -> Iterator[Series]:
    by_size = sorted(run.history.datasets.items(), key=lambda item: -float(np.nansum(item[1][1])))
    for place, (name, (loss, _)) in enumerate(by_size):
        yield run.series(name, loss, place)


def _sizes(run: Run) -> Iterator[Series]:
    """Yield the number of ranks, if it has changed."""
    sizes = run.history.columns["world_size"]
    if len(set(sizes[np.isfinite(sizes)].tolist())) > 1:
        yield from run.column("ranks", "world_size")


Chart = tuple[str, str, str, Callable[[Run], Iterable[Series]]]
"""Id, title, the name of the y axis, and the curves of a run."""
_GIB = 2**-30
_LEARNING: Sequence[Chart] = (
    (
        "accuracy", "accuracy", "share of tokens",
        lambda run: [
            *run.column("train", "accuracy"), *run.evaluations("accuracy", colours_from=1, of="tokens")
        ],
    ),
    ("lr", "learning rate", "learning rate", lambda run: run.column("", "lr")),
    ("grad_norm", "gradient norm", "norm", lambda run: run.column("", "grad_norm")),
)  # fmt: skip
_PREFERENCES: Sequence[Chart] = (
    (
        "pairs", "right pairs", "% of the pairs",
        lambda run: [
            *run.column("train", "rewards/accuracies", scale=100),
            *run.evaluations("accuracy", colours_from=1, of="groups", scale=100),
        ],
    ),
    (
        "rewards", "rewards", "reward",
        lambda run: [
            *run.column("chosen", "rewards/chosen"), *run.column("rejected", "rewards/rejected", 1),
            *run.column("margin", "rewards/margins", 2), *run.evaluations("margins", colours_from=3),
        ],
    ),
    (
        "classes", "right documents", "% of the documents",
        lambda run: run.evaluations("accuracy", of="scores", scale=100),
    ),
    ("kl", "distance from the reference", "nats", lambda run: run.column("", "kl")),
    (
        "teacher", "distance from the teacher", "nats for each target",
        lambda run: [
            *run.column("teacher to student", "kl/forward"), *run.column("student to teacher", "kl/reverse", 1),
            *run.column("cross-entropy of the data", "nll", 2),
        ],
    ),
)  # fmt: skip
_SPEED: Sequence[Chart] = (
    ("speed", "tokens a second", "tokens/s", lambda run: run.column("", "tokens_per_second")),
    ("mfu", "model FLOPs utilization", "% of the peak", lambda run: run.column("", "mfu", scale=100)),
)
_OF_ONE: Sequence[Chart] = (
    ("loss", "loss", "loss", lambda run: [*run.loss(), *run.evaluations("loss", colours_from=1)]),
    *_PREFERENCES,
    *_LEARNING,
    ("datasets", "loss by dataset", "loss", _datasets),
    *_SPEED,
    ("memory", "memory of the device", "GiB", lambda run: run.column("", "memory_bytes", 0, _GIB)),
    ("host", "memory in use on the fullest node", "GiB", lambda run: run.column("", "host_memory_bytes", 1, _GIB)),
    (
        "parts", "parts of a step", "seconds",
        lambda run: [
            *run.column("step", "step_seconds", 0), *run.column("data wait", "data_seconds", 1),
            *run.column("compute", "rank_compute_seconds.1", 2),
        ],
    ),
    ("ranks", "a step, fastest to slowest rank", "seconds", lambda run: run.ranks("step", "rank_seconds")),
    (
        "ranks_data", "waiting for data, fastest to slowest rank", "seconds",
        lambda run: run.ranks("data wait", "rank_data_seconds", 1),
    ),
    (
        "ranks_compute", "computing, fastest to slowest rank", "seconds",
        lambda run: run.ranks("compute", "rank_compute_seconds", 2),
    ),
    ("gpu", "GPU in use, the least", "% of the time", lambda run: run.column("GPU", "gpu_utilization")),
    ("ranks_number", "ranks", "ranks", _sizes),
    ("experts", "busiest expert over the mean", "times the mean", lambda run: run.column("experts", "expert_load")),
    ("node_gpu", "GPUs of the nodes", "% of the time", lambda run: run.nodes("gpu_util")),
    ("node_gpu_memory", "memory of the fullest GPU of a node", "GiB", lambda run: run.nodes("gpu_memory", _GIB)),
    ("node_rss", "memory that the ranks of a node use", "GiB", lambda run: run.nodes("host_rss", _GIB)),
    ("node_free", "memory that a node has left", "GiB", lambda run: run.nodes("host_free", _GIB)),
)  # fmt: skip
_OF_SEVERAL: Sequence[Chart] = (
    ("loss", "training loss", "loss", Run.loss),
    ("accuracy", "training accuracy", "share of tokens", lambda run: run.column("", "accuracy")),
    ("pairs", "right pairs in training", "% of the pairs", lambda run: run.column("", "rewards/accuracies", scale=100)),
    ("rewards", "margin of rewards in training", "reward", lambda run: run.column("", "rewards/margins")),
    *_LEARNING[1:],
    *_SPEED,
    ("parts", "a step", "seconds", lambda run: run.column("", "step_seconds")),
    ("memory", "memory of the device", "GiB", lambda run: run.column("", "memory_bytes", scale=_GIB)),
)
_MOST_METRICS = 12


def _metrics_of(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each metric that was evaluated: train and eval of several runs in one could not be told apart.

    Runs that are compared have the colours, so what is measured cannot have them too.
    """
    found = dict.fromkeys(name for run in runs for name in run.history.evaluations if not names.is_of_subject(name))
    return [
        (f"eval{index}", name, name.rpartition("/")[2].replace("_", " "), partial(Run.metric, name=name))
        for index, name in enumerate(list(found)[:_MOST_METRICS])
    ]


def charts_of(histories: Sequence[History]) -> dict[str, Any]:
    """Return axes and charts of a page; a chart without a curve is left out."""
    runs = [Run(history, index, alone=len(histories) == 1) for index, history in enumerate(histories)]
    found = [
        {"id": name, "title": title, "unit": unit, "series": series[:_MOST_SERIES], "left": len(series[_MOST_SERIES:])}
        for name, title, unit, each in (_OF_ONE if len(runs) == 1 else [*_OF_SEVERAL, *_metrics_of(runs)])
        if (series := [one for run in runs for one in each(run)])
    ]
    return {"axes": [run.axis() for run in runs], "charts": found}


def _some(points: Sequence[tuple[int, float, float]], most: int) -> Sequence[tuple[int, float, float]]:
    """Return all points; if there are more than `most`, the least and the greatest of every bucket."""
    if len(points) <= most:
        return points
    kept: list[tuple[int, float, float]] = []
    edges = buckets(len(points), most // 2)
    for first, end in zip(edges[:-1], edges[1:], strict=True):
        group = sorted(points[first:end], key=lambda point: (math.isnan(point[1]), point[1]))
        kept += sorted({group[0], group[-1]})
    return kept
