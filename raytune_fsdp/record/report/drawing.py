"""What is drawn without the page's script: the loss curves, and bars. Paths are of numbers only; words are escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 1000, 300, 62, 8, 22


def static_curves(chart: dict[str, Any], axes: Sequence[dict[str, Any]]) -> Markup:
    """A chart as SVG, with the scale at its ends."""
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
    """A histogram; each bar says what it is."""
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
    """Runs of points that have a value."""
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
