"""The page's tables about a run's data: what became of the rows, how full the samples are, each dataset's share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.record import names
from raytune_fsdp.record.report.facts import samples_seen
from raytune_fsdp.record.report.history import History
from raytune_fsdp.record.report.marks import AxisMark

_LOST = {names.ROWS_DROPPED, names.ROWS_SKIPPED, names.ROWS_HELD_OUT, names.ROWS_LEFT_OUT, names.COLUMN_NOT_READ}
_MOST_NOTES, _MOST_DATASETS = 20, 100


def rows_of(history: History, marks: list[AxisMark]) -> dict[str, Any]:
    """Collect what is on record about the data, for the page. Without a census there is no count."""
    census = history.census
    sums = {name: float(targets.sum()) for name, (_, targets) in history.datasets.items()}
    total = sum(sums.values())
    by_size = sorted(sums.items(), key=lambda item: -item[1])
    found: dict[str, Any] = {
        "packed": _packed(history),
        # Tokens that were trained on, and their share of all.
        "shares": [(name, f"{int(tokens):,}", f"{tokens / total:.1%}") for name, tokens in by_size if total],
        "notes": [mark.words for mark in marks if mark.event in _LOST][:_MOST_NOTES],
        "bars": [],
        "ticks": [],
    }
    if census is None:
        return found
    targets, samples = census.total.target_tokens, sum(census.epochs)
    epochs = "an epoch" if len(census.epochs) == 1 else f"{len(census.epochs):,} epochs"
    found["bars"], found["ticks"] = _lengths(census)
    found["most"] = max(census.total.lengths.values(), default=0)
    found["counted"] = (
        f"Counted before training, over {epochs}: {samples:,} packed samples of {census.seq_len:,} tokens, "
        f"{census.efficiency:.1%} full."
    )
    # Name, rows, documents, tokens, trained tokens, their share, dropped, cut off and cut apart, by dataset.
    found["counts"] = [
        (
            name, f"{each.rows:,}", f"{each.documents:,}", f"{each.tokens:,}", f"{each.target_tokens:,}",
            f"{each.target_tokens / targets:.1%}" if targets else "", f"{sum(each.dropped.values()):,}",
            f"{each.truncated:,}", f"{each.cut:,}",
        )
        for name, each in zip(census.names[:_MOST_DATASETS], census.datasets, strict=False)
    ]  # fmt: skip
    return found


def _packed(history: History) -> str:
    """Return a sentence on how full the trained samples were; an empty text if that is not known."""
    seq_len, samples = history.setting("data.seq_len"), samples_seen(history)
    steps, tokens = len(history.steps), float(history.columns["tokens"].sum())
    if samples is None or not is_count(seq_len) or seq_len < 1 or steps != history.steps[-1]:
        return ""  # if a step is missing, samples and tokens would not be of the same steps
    return f"{samples:,} packed samples of {seq_len:,} tokens are trained, {tokens / (samples * seq_len):.1%} full."


def _lengths(census: Census) -> tuple[list[tuple[float, float, float, str]], list[tuple[float, str]]]:
    """Return a bar for each quarter of an octave, as the census counts documents, and ticks below.

    Of a bar its place, width and height as fractions of 1, and words.
    """
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
            f"{_from(bucket):,} to {max(_from(bucket), _from(bucket + 1) - 1):,} tokens: {many:,} documents",
        )
        for bucket, many in sorted(lengths.items())
        if many
    ]
    octaves: Any = np.arange(first, last + 2, 4 * max(1, math.ceil((last - first) / 4 / 6)))
    return bars, [((bucket - first) * width, f"{2 ** (int(bucket) // 4):,}") for bucket in octaves]


def _from(bucket: int) -> int:
    return math.ceil(2 ** (bucket / 4))
