"""An empty figure to draw into, and what is said where matplotlib is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import UserError, pip_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_INSTALLED = f"matplotlib is not installed: {pip_install('plots')}"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches; needs no display."""
    if not can_draw():
        raise UserError(NOT_INSTALLED)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
