"""Draw `metrics.jsonl` as a picture: loss with the evaluations of every dataset, gradient norm, learning rate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.errors import UserError, pip_install
from raytune_fsdp.plan.run_dir import METRICS_FILE
from raytune_fsdp.record.jsonl import each_line_of, read_trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# An empty figure to draw into, and the message if matplotlib is not installed.

NOT_INSTALLED = f"matplotlib is not installed: {pip_install('plots')}"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def new_figure(height: float) -> Figure:
    """Return a figure of 9 by `height` inches; needs no display."""
    if not can_draw():
        raise UserError(NOT_INSTALLED)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


SMOOTH_FROM_STEPS = 100
"""Shorter runs are drawn without smoothing."""


def plot(run_dir: Path, png_path: Path) -> None:
    """Draw the curves of a run, finished or not. Needs no display."""
    lines = [line for line in each_line_of(run_dir) if line is not None]
    steps = [line["trajectory"] for line in lines if line["kind"] == "step"]
    if not steps:
        raise UserError(f"{run_dir / METRICS_FILE} has no steps yet, so there is nothing to draw")
    figure = new_figure(7)
    loss, grad_norm, lr = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 1))
    _draw_loss(loss, steps, [line for line in lines if line["kind"] == "eval"])
    loss.set_title(run_dir.resolve().name)
    _draw_line(grad_norm, steps, "grad_norm", "gradient norm")
    _draw_line(lr, steps, "lr", "learning rate")
    lr.set_xlabel("step")
    save_png(figure, png_path)


def plot_runs(run_dirs: Sequence[Path], png_path: Path) -> None:
    """Draw all curves of one run, or only the losses of several, in one picture."""
    if len(run_dirs) == 1:
        plot(run_dirs[0], png_path)
        return
    runs = [(path.resolve().name, read_trajectory(path / METRICS_FILE)) for path in run_dirs]
    if not any(steps for _, steps in runs):
        raise UserError(f"{', '.join(map(str, run_dirs))}: no run has steps yet, so there is nothing to draw")
    figure = new_figure(5)
    axes = figure.subplots()
    for index, (name, steps) in enumerate(runs):
        y = smoothed([step["loss"] for step in steps], len(steps) // SMOOTH_FROM_STEPS)
        axes.plot([step["step"] for step in steps], y, color=f"C{index % 10}", label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, png_path)


def evaluations(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the loss by step for every evaluated dataset, from the lines of the record."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "eval":
            for key, value in line["values"].items():
                if key.startswith("eval/") and key.endswith("/loss"):
                    found[key.removeprefix("eval/").removesuffix("/loss")].append((line["step"], value))
    return dict(found)


def smoothed(values: list[float], reach: int) -> list[float]:
    """Return the mean of each value and up to `reach` on either side, so it does not lag. Skips non-finite values."""
    # With running sums, the work does not grow with `reach`.
    totals, counts = [0.0], [0]
    for value in values:
        known = math.isfinite(value)
        totals.append(totals[-1] + (value if known else 0.0))
        counts.append(counts[-1] + known)
    means = []
    for index in range(len(values)):
        first, end = max(index - reach, 0), min(index + reach + 1, len(values))
        count = counts[end] - counts[first]
        means.append((totals[end] - totals[first]) / count if count else math.nan)
    return means


def _draw_loss(axes: Axes, steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    x, y = [step["step"] for step in steps], [step["loss"] for step in steps]
    if len(x) >= SMOOTH_FROM_STEPS:
        # About 2 % of the run, so that long and short runs look equally smooth.
        reach = len(x) // 100
        axes.plot(x, y, color="0.75", linewidth=0.8)
        axes.plot(x, smoothed(y, reach), color="C0", label=f"train, mean of {2 * reach + 1} steps")
    else:
        axes.plot(x, y, color="C0", label="train")
    for index, (name, points) in enumerate(evaluations(evals).items(), start=1):
        x, y = [step for step, _ in points], [value for _, value in points]
        axes.plot(x, y, "o-", color=f"C{index % 10}", markersize=4, linewidth=1, label=f"eval {name}")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_line(axes: Axes, steps: list[dict[str, Any]], key: str, label: str) -> None:
    axes.plot([step["step"] for step in steps], [step[key] for step in steps], color="C0", linewidth=1)
    axes.set_ylabel(label)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useOffset=False)
    axes.grid(alpha=0.3)
