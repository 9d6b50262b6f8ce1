"""What of a config differs from its defaults, and nothing else."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.run.open_record import params_of

LEAST: dict[str, Any] = {
    "run": {"name": "x"},
    "model": {"path": "m"},
    "data": {"train": [{"path": "a.jsonl"}]},
    "train": {"max_steps": 5, "global_batch": 8},
}


def params(**more: Any) -> dict[str, object]:
    return params_of(FinetuneConfig.model_validate({**LEAST, **more}))


def test_what_is_written_and_what_every_run_must_say_is_there() -> None:
    least = {
        "run.name": "x", "model.path": "m", "data.train.0.path": "a.jsonl", "train.max_steps": 5,
        "train.global_batch": 8,
    }  # fmt: skip
    assert params() == least
    assert params(optim={"lr": FinetuneConfig.model_validate(LEAST).optim.lr}) == least, "written, and no other value"
    assert params(optim={"lr": 0.5}, checkpoint={"every": 7}) == {**least, "optim.lr": 0.5, "checkpoint.every": 7}


def test_a_section_of_another_kind_says_which() -> None:
    found = params(
        method={"type": "lora", "rank": 3},
        data={"train": [{"path": "a"}, {"path": "b", "weight": 2.0, "format": {"type": "tokens"}}]},
    )
    chosen = {key: value for key, value in found.items() if key.startswith(("method", "data"))}
    assert chosen == {
        "method.type": "lora", "method.rank": 3, "data.train.0.path": "a", "data.train.1.path": "b",
        "data.train.1.weight": 2.0, "data.train.1.format.type": "tokens",
    }  # fmt: skip
    assert params(method={"type": "ia3"})["method.type"] == "ia3", "with all of its defaults"


def test_no_secret_is_there() -> None:
    tracking = {"mlflow": {"uri": "http://user:hunter2@tracking:5000"}}
    found = params(tracking=tracking, cluster={"env": {"DB_PASSWORD": "hunter2"}})
    assert found["tracking.mlflow.uri"] == "http://tracking:5000" and "hunter2" not in str(found)
