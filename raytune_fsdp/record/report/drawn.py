"""What the page draws without its script: the curves of the loss, a histogram, how far confidence is to be trusted, and
the small curves of a list of runs.

Paths have numbers only; words are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 1000, 300, 74, 24, 22
_BARS_WIDTH, _BARS_HEIGHT = 360, 130
_SQUARE = 240
_STEPS_IN_TEN = (1, 2, 5)


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a scale: three at least, eight at most. The page's script has the same rule."""
    span = high - low
    if not 1e-300 < span < math.inf:
        return [low]
    found: list[float] = []
    finer = 3 * math.ceil(math.log10(span))
    while len(found) < 3:
        step = _STEPS_IN_TEN[finer % 3] * 10.0 ** (finer // 3)
        found = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        finer -= 1
    return found


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a logarithmic scale, eight at most: 1, 2 and 5 times powers of ten, or powers alone."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [value for power in powers for n in _STEPS_IN_TEN if low <= (value := float(f"{n}e{power}")) <= high]
    if len(found) < 3:
        return ticks(low, high)
    if len(found) > 8:
        found = [value for power in powers if low <= (value := float(f"1e{power}")) <= high]
    return found[:: math.ceil(len(found) / 8)]


def static_curves(chart: dict[str, Any], axes: Sequence[dict[str, Any]]) -> Markup:
    """Return a chart as SVG."""
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
    for value in ticks(*up):
        y = _place(value, up, _TOP + _HEIGHT, -_HEIGHT)
        paths += [_line(y), _text(_LEFT - 6, y + 4, f"{value:.5g}", "end")]
    for step in (each for each in ticks(*across) if each == round(each)):
        x = _place(step, across, _LEFT, _WIDTH - _LEFT)
        paths.append(_text(x, _TOP + _HEIGHT + 16, f"{step:,.0f}", "end" if x > _WIDTH - 40 else "middle"))
    paths += [_text(0, 11, chart["unit"], "start"), _text(_LEFT - 6, _TOP + _HEIGHT + 16, "step", "end")]
    size = f"0 0 {_WIDTH} {_TOP + _HEIGHT + _BELOW}"
    return Markup('<svg viewBox="{}" role="img" aria-label="{}">{}</svg>').format(
        size, chart["title"], Markup("").join(paths)
    )


def bars(of: Sequence[tuple[float, float, float, str]], across: Sequence[tuple[float, str]], most: int) -> Markup:
    """Return a histogram of documents as SVG; each bar says what it is. `most`: the height of the highest."""
    wide, high = _BARS_WIDTH - _LEFT - 24, _BARS_HEIGHT
    drawn = []
    for value in ticks(0, most):
        y = _TOP + high * (1 - value / most)
        if value == round(value):
            drawn += [_line(y, _BARS_WIDTH), _text(_LEFT - 6, y + 4, f"{value:,.0f}", "end")]
    drawn += [
        Markup(
            '<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
        ).format(_LEFT + place * wide, _TOP + high * (1 - height), max(1.0, width * wide - 1), high * height, words)
        for place, width, height, words in of
    ]
    drawn += [_text(_LEFT + place * wide, _TOP + high + 16, words, "middle") for place, words in across]
    drawn += [_text(0, 11, "documents", "start"), _text(_BARS_WIDTH, _TOP + high + 32, "tokens of a document", "end")]
    return Markup('<svg class="bars" viewBox="0 0 {} {}" role="img" aria-label="documents by length">{}</svg>').format(
        _BARS_WIDTH, _TOP + high + 38, Markup("").join(drawn)
    )


def reliability(points: Sequence[tuple[float, float]], dataset: str) -> Markup:
    """Return a reliability curve as SVG: the share of right documents over their confidence, beside the diagonal."""
    side, right = _SQUARE, _LEFT + _SQUARE
    drawn = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, x = _TOP + side * (1 - value), _LEFT + side * value
        drawn += [_line(y, right), _text(_LEFT - 6, y + 4, f"{value:.0%}", "end")]
        drawn.append(_text(x, _TOP + side + 16, f"{value:.0%}", "middle"))
    drawn.append(Markup('<path class="grid" d="M{} {}L{} {}"/>').format(_LEFT, _TOP + side, right, _TOP))
    places = [(_LEFT + side * x, _TOP + side * (1 - y), f"{x:.1%} sure, {y:.1%} right") for x, y in points]
    drawn.append(Markup('<path class="curve s0" d="M{}"/>').format("L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)))
    drawn += [
        Markup('<circle class="dot s0" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>').format(*place)
        for place in places
    ]
    drawn += [_text(0, 11, "right", "start"), _text(right, _TOP + side + 32, "confidence", "end")]
    return Markup('<svg class="bars" viewBox="0 0 {} {}" role="img" aria-label="reliability of {}">{}</svg>').format(
        _BARS_WIDTH, _TOP + side + 38, dataset, Markup("").join(drawn)
    )


def small_curve(values: Sequence[float]) -> Markup:
    """Return a curve without a scale, for a row of a table; nothing for less than two values."""
    finite = [(i, value) for i, value in enumerate(values) if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    places = [
        f"{_place(i, (0, len(values) - 1), 1, 88):.1f} {_place(value, (low, high), 21, -20):.1f}" for i, value in finite
    ]
    return Markup(
        '<svg class="small" viewBox="0 0 90 22" aria-hidden="true"><path class="curve s0" d="M{}"/></svg>'
    ).format("L".join(places))


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
    places = [
        f"{_place(x, across, _LEFT, _WIDTH - _LEFT):.1f} {_place(y, up, _TOP + _HEIGHT, -_HEIGHT):.1f}"
        for x, y in points
    ]
    return f"M{'L'.join(places)}" + ("h.1" if len(places) == 1 else "")


def _place(value: float, scale: tuple[float, float], start: float, length: float) -> float:
    # Divided before they are subtracted: a span of the largest floats would be infinite.
    whole = scale[1] / 2 - scale[0] / 2
    return start + length * ((value / 2 - scale[0] / 2) / whole if whole else 0.0)


def _line(y: float, end: float = _WIDTH) -> Markup:
    return Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(_LEFT, end, y, y)


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, words)
