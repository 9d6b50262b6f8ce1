"""The page itself: one file that brings all it needs, and asks for nothing but points of its own server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from raytune_fsdp import __version__
from raytune_fsdp.predict.devices import DEVICES
from raytune_fsdp.predict.page import grid
from raytune_fsdp.predict.page.choices import Chosen, Offered
from raytune_fsdp.record.report.sealed import embedded, hash_of

_HERE = Path(__file__).parent

_CONTROLS = {
    # Of each: what it is called, and how it looks.
    "model": ("Model", "list"),
    "device": ("GPU", "list"),
    "gpus": ("Number of GPUs", "slider"),
    "method": ("Method", "buttons"),
    "seq_len": ("Tokens a sample", "slider"),
    "micro_batch": ("Samples at a time and GPU", "slider"),
    "global_batch": ("Samples a step, of all GPUs", "slider"),
    "recompute": ("Recomputed in backward", "buttons"),
    "strategy": ("How weights are spread", "list"),
}

_METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}

_ROOFLINE = (
    "Speed is a roofline over the operations of a traced step, of which published runs reach about 70 %: of 54 that "
    "were scored, 50 are within 30 %, and the median is off by 11 %. Samples are full, and of one document each."
)
_MEMORY = (
    "Memory is traced: the code of a run computes a step on tensors without data. What no tensor has, CUDA's context "
    "with libraries and the holes of the allocator, is assumed."
)


def live_page(title: str, start: Chosen, among: Offered, *, price: float | None, notes: Iterable[str]) -> str:
    """A page that asks the server it is from."""
    return _page(
        title,
        start={name: getattr(start, name) for name in _CONTROLS if hasattr(start, name)},
        among=among,
        price=price,
        notes=[*notes, _MEMORY, _ROOFLINE],
        connects=True,
    )


def static_page(points: Mapping[str, Any]) -> str:
    """A page that has its points inside, by model, method, length, recomputation and number of GPUs."""
    among = {
        "model": list(points),
        "device": grid.ON,
        "gpus": sorted({size for each in points.values() for one in each.values() for size in one["gpus"]}),
        "method": [name for name in _METHODS if any(name in each for each in points.values())],
        "seq_len": grid.LENGTHS,
        "recompute": grid.RECOMPUTE,
    }
    first = next(iter(points))
    return _page(
        "What fine-tuning needs",
        start={
            "model": first,
            "device": "H100",
            "gpus": 8,
            "method": next(iter(points[first])),
            "seq_len": 8192,
            "recompute": "selective",
        },  # fmt: skip
        among=among,
        price=None,
        notes=[
            "Of each model, numbers of GPUs around the least that do. A step has one sample on every GPU; weights, "
            "gradients and the optimizer's state are spread over all of them (parallel.strategy: full_shard), adapters "
            f"have rank 16. Machines have {grid.PER_NODE} GPUs, and {grid.NETWORK} to the others. "
            "raytune-fsdp plan --serve has this page for any config, with batches, strategies and every GPU.",
            _MEMORY,
            _ROOFLINE,
        ],
        connects=False,
        points={
            "grid": points,
            "common": grid.COMMON,
            "of_device": grid.OF_DEVICE,
            "on": grid.ON,
            "lengths": grid.LENGTHS,
            "recompute": grid.RECOMPUTE,
            "tokens": 100_000_000,
        },  # fmt: skip
    )


def _page(
    title: str,
    *,
    start: Mapping[str, Any],
    among: Mapping[str, Sequence[Any]],
    price: float | None,
    notes: Sequence[str],
    connects: bool,
    points: Mapping[str, Any] | None = None,
) -> str:
    style, script = (_HERE / "page.css").read_text(encoding="utf-8"), (_HERE / "page.js").read_text(encoding="utf-8")
    controls = [
        {"name": name, "label": label, "kind": kind, "values": list(among[name])}
        for name, (label, kind) in _CONTROLS.items()
        if name in among
    ]
    data = {
        "controls": controls,
        "start": dict(start),
        "price": price,
        "memory": {name: int(DEVICES[name].memory) for name in among["device"]},
        "compared": list(grid.ON),
        "methods": _METHODS,
        "points": points,
    }
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.jinja").render(
        title=title,
        version=__version__,
        controls=controls,
        lasts=points is not None,
        notes=notes,
        connects=connects,
        style=Markup(style),
        style_hash=hash_of(style),
        script=Markup(script),
        script_hash=hash_of(script),
        data=Markup(embedded(data)),
    )
