"""The data of a run as its page shows it: what became of the rows, how full the samples are, who has which share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytune_fsdp.plan.counts import Census
from raytune_fsdp.record import names
from raytune_fsdp.record.report.history import History
from raytune_fsdp.record.report.marks import AxisMark

_LOST = {names.ROWS_DROPPED, names.ROWS_SKIPPED, names.ROWS_HELD_OUT, names.ROWS_LEFT_OUT, names.COLUMN_NOT_READ}
_MOST_NOTES, _MOST_DATASETS = 20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOnRecord:
    """The data, in a form for the page."""

    packed: str
    """How full the packed samples were that are trained; empty if it is not known."""
    shares: list[tuple[str, int, float]]
    """Of each dataset: tokens that were trained on, and which part that is of all."""
    counts: list[tuple[str, ...]]
    """Of each dataset: name, rows, documents, tokens, trained tokens, share of them, dropped, cut off, cut apart."""
    counted: str
    bars: list[tuple[float, float, float, str]]
    """Documents by length: place, width and height as parts of 1, and words."""
    ticks: list[tuple[float, str]]
    """Lengths below the bars."""
    notes: list[str]


def rows_of(history: History, marks: list[AxisMark]) -> DataOnRecord:
    """What is on record of the data."""
    census = history.census
    bars, ticks = _lengths(census) if census is not None else ([], [])
    return DataOnRecord(
        packed=_packed(history),
        shares=_shares(history),
        counts=_counts(census) if census is not None else [],
        counted=_counted(census) if census is not None else "",
        bars=bars,
        ticks=ticks,
        notes=[mark.words for mark in marks if mark.event in _LOST][:_MOST_NOTES],
    )


def _packed(history: History) -> str:
    batch, total, seq_len = history.planned("global_batch"), history.planned("total_samples"), None
    seq_len = history.setting("data.seq_len")
    steps, tokens = len(history.steps), float(history.columns["tokens"].sum())
    if batch is None or type(seq_len) is not int or seq_len < 1 or not steps or steps != history.steps[-1]:
        return ""  # with a step missing, samples and tokens would not be of the same steps
    samples = min(steps * batch, total or steps * batch)
    return f"{samples:,} packed samples of {seq_len:,} tokens are trained, {tokens / (samples * seq_len):.1%} full."


def _shares(history: History) -> list[tuple[str, int, float]]:
    sums = {name: float(targets.sum()) for name, (_, targets) in history.datasets.items()}
    total = sum(sums.values())
    by_size = sorted(sums.items(), key=lambda item: -item[1])
    return [(name, int(tokens), tokens / total) for name, tokens in by_size if total]


def _counts(census: Census) -> list[tuple[str, ...]]:
    targets = census.total.target_tokens
    return [
        (
            name, f"{each.rows:,}", f"{each.documents:,}", f"{each.tokens:,}", f"{each.target_tokens:,}",
            f"{each.target_tokens / targets:.1%}" if targets else "", f"{sum(each.dropped.values()):,}",
            f"{each.truncated:,}", f"{each.cut:,}",
        )
        for name, each in zip(census.names[:_MOST_DATASETS], census.datasets, strict=False)
    ]  # fmt: skip


def _counted(census: Census) -> str:
    samples = sum(census.epochs)
    epochs = "an epoch" if len(census.epochs) == 1 else f"{len(census.epochs):,} epochs"
    return (
        f"Counted before training, over {epochs}: {samples:,} packed samples of {census.seq_len:,} tokens, "
        f"{census.efficiency:.1%} full."
    )


def _lengths(census: Census) -> tuple[list[tuple[float, float, float, str]], list[tuple[float, str]]]:
    """A bar for each quarter of an octave, as the census counts documents."""
    lengths = census.total.lengths
    if not any(lengths.values()):
        return [], []
    first, last = min(lengths), max(lengths)
    first, last = first // 4 * 4, last // 4 * 4 + 3  # whole octaves, which have round names
    width, most = 1 / (last - first + 1), max(lengths.values())
    bars = [
        (
            (bucket - first) * width,
            width,
            many / most,
            f"{_from(bucket):,} to {_to(bucket):,} tokens: {many:,} documents",
        )
        for bucket, many in sorted(lengths.items())
        if many
    ]
    octaves: Any = np.arange(first, last + 2, 4 * max(1, math.ceil((last - first) / 4 / 10)))
    return bars, [((bucket - first) * width, f"{2 ** (int(bucket) // 4):,}") for bucket in octaves]


def _from(bucket: int) -> int:
    return math.ceil(2 ** (bucket / 4))


def _to(bucket: int) -> int:
    return max(_from(bucket), math.ceil(2 ** ((bucket + 1) / 4)) - 1)
