"""A sweep to try out: four learning rates for the model of the recipe `demo`, without Ray, in about a minute."""

from __future__ import annotations

from typing import Any

_BASE = (
    "--train.epochs=null", "--train.max_steps=80", "--eval.every=20", "--eval.at_start=false", "--eval.prompts=[]",
    "--checkpoint.every=null", "--export.at_end=false", "--cluster.launch=local", "--cluster.workers=1",
    "--tracking.mlflow.enabled=false", "--optim.schedule.type=constant",
)  # fmt: skip


def demo() -> dict[str, Any]:
    """Return it as a sweep.yaml would say it."""
    from raytune_fsdp.config.load import load_config

    base = load_config("demo", _BASE).model_dump()
    return {
        "name": "demo-sweep",
        "base": {name: section for name, section in base.items() if name != "run"} | {"run": {"seed": 7}},
        "space": {"optim.lr": {"grid": [1e-4, 1e-3, 3e-3, 1e-2]}},
        "scheduler": {"type": "rungs", "first": 20, "eta": 2},
        "metric": "eval/heldout/loss",
        "concurrent": 2,
    }
