"""The page's tables about a run's data: what became of the rows, how full the samples are, each dataset's share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from raytune_fsdp.plan.counts import Census
from raytune_fsdp.record import names
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
    batch, total = history.planned("global_batch"), history.planned("total_samples")
    seq_len = history.setting("data.seq_len")
    steps, tokens = len(history.steps), float(history.columns["tokens"].sum())
    if batch is None or type(seq_len) is not int or seq_len < 1 or not steps or steps != history.steps[-1]:
        return ""  # if a step is missing, samples and tokens would not be of the same steps
    samples = min(steps * batch, total or steps * batch)
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
    octaves: Any = np.arange(first, last + 2, 4 * max(1, math.ceil((last - first) / 4 / 10)))
    return bars, [((bucket - first) * width, f"{2 ** (int(bucket) // 4):,}") for bucket in octaves]


def _from(bucket: int) -> int:
    return math.ceil(2 ** (bucket / 4))


# Drawn without the page's script: the loss curves, and bars. Paths have numbers only; words are escaped.

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 1000, 300, 62, 8, 22


def static_curves(chart: dict[str, Any], axes: Sequence[dict[str, Any]]) -> Markup:
    """Return a chart as SVG, with the ends of its scales."""
    xs = [step for axis in axes for step in (*axis["from"][:1], *axis["to"][-1:])]
    xs += [point[0] for series in chart["series"] for point in series.get("points", ())]
    ys = [value for series in chart["series"] for value in _values(series) if value is not None]
    if not xs or not ys:
        return Markup("<p>No value is finite.</p>")
    across, up = (min(xs), max(xs)), (min(ys), max(ys))
    paths = [
        Markup('<path class="curve s{}" d="{}"/>').format(series["colour"], _path(points, across, up))
        for series in chart["series"]
        for points in _lines(series, axes)
    ]
    texts = [
        _text(_LEFT - 6, _TOP + 8, f"{up[1]:.4g}", "end"),
        _text(_LEFT - 6, _TOP + _HEIGHT, f"{up[0]:.4g}", "end"),
        _text(_LEFT, _TOP + _HEIGHT + 16, f"{across[0]:,}", "start"),
        _text(_WIDTH, _TOP + _HEIGHT + 16, f"step {across[1]:,}", "end"),
    ]
    size = f"0 0 {_WIDTH} {_TOP + _HEIGHT + _BELOW}"
    return Markup('<svg viewBox="{}" role="img" aria-label="{}">{}</svg>').format(
        size, chart["title"], Markup("").join([*paths, *texts])
    )


def bars(of: Sequence[tuple[float, float, float, str]], ticks: Sequence[tuple[float, str]]) -> Markup:
    """Return a histogram as SVG; each bar says what it is."""
    high, wide = 120, _WIDTH - 2 * 20
    drawn = [
        Markup(
            '<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
        ).format(20 + place * wide, _TOP + high * (1 - height), max(1.0, width * wide - 1), high * height, words)
        for place, width, height, words in of
    ]
    labels = [_text(20 + place * wide, _TOP + high + 16, words, "middle") for place, words in ticks]
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="documents by length">{}</svg>').format(
        _WIDTH, _TOP + high + _BELOW, Markup("").join([*drawn, *labels])
    )


def _values(series: dict[str, Any]) -> Iterator[float | None]:
    if "points" in series:
        yield from (point[2] for point in series["points"])
    else:
        yield from series.get("smooth") or series["mid"]


def _lines(series: dict[str, Any], axes: Sequence[dict[str, Any]]) -> Iterator[list[tuple[int, float]]]:
    """Yield runs of points that have a value."""
    own = series.get("points")
    places = axes[series["axis"]]["to"] if own is None else [point[0] for point in own]
    piece: list[tuple[int, float]] = []
    for place, value in zip(places, _values(series), strict=True):
        if value is not None:
            piece.append((place, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _path(points: Sequence[tuple[int, float]], across: tuple[int, int], up: tuple[float, float]) -> str:
    wide, high = max(across[1] - across[0], 1), (up[1] - up[0]) or 1.0
    places = [
        f"{_LEFT + (x - across[0]) / wide * (_WIDTH - _LEFT):.1f} {_TOP + _HEIGHT * (1 - (y - up[0]) / high):.1f}"
        for x, y in points
    ]
    return f"M{'L'.join(places)}" + ("h.1" if len(places) == 1 else "")


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, words)
