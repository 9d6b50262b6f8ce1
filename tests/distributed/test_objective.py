"""What a run adds to its loss is the same at every world size, and goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_metrics
from raytune_fsdp.record.names import step_values
from raytune_fsdp.run.prepare import prepare
from tests.runs import GPT2, LLAMA, largest_difference, make_config, trajectory

SLOW = pytest.mark.slow
STEPS = 4
ALL = {"neftune_noise_alpha": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3}
BOUNDS = {"gpt2": (1e-10, 1e-10), "llama": (1e-8, 1e-6)}
"""Relative, of losses and gradient norms, in fp64."""


def config_of(directory: Path, name: str, train: dict[str, Any], **sections: Any) -> FinetuneConfig:
    architecture = sections.pop("architecture", {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1})
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": STEPS, **train}
    return make_config(directory, architecture, run={"name": name}, train=train, **sections)


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [("gpt2", (3,)), pytest.param("gpt2", (2, 4), marks=SLOW), pytest.param("llama", (2, 3, 4), marks=SLOW)],
)
def test_worlds_agree(tmp_path: Path, kind: str, worlds: tuple[int, ...]) -> None:
    """With dropout, whose numbers come after those of the noise."""
    sections: Any = {"architecture": LLAMA} if kind == "llama" else {}
    alone = trajectory(config_of(tmp_path, "alone", ALL, **sections), 1)
    without = trajectory(config_of(tmp_path, "without", {}, **sections), 1)
    assert all(abs(a["loss"] / b["loss"] - 1) > 1e-3 for a, b in zip(alone, without, strict=True)), "they do nothing"
    for world in worlds:
        rows = trajectory(config_of(tmp_path, f"w{world}", ALL, **sections), world)
        for key, bound in zip(("loss", "grad_norm"), BOUNDS[kind], strict=True):
            assert largest_difference(alone, rows, key) < bound


MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48, "head_dim": 8, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
ROUTERS = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}


def test_routers_balance_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    """In fp32, as torch has no grouped products in fp64; with blocks computed again, and going on at another world."""
    sections: Any = {
        "architecture": MIXTURE,
        "parallel": {"precision": "fp32", "activation_checkpointing": "full"},
        "checkpoint": {"every": 2, "asynchronous": False},
    }
    configs = {name: config_of(tmp_path, name, ROUTERS, **sections) for name in ("alone", "three")}
    alone = trajectory(configs["alone"], 1)
    trajectory(configs["three"], 3, stop_after=3)
    rows = trajectory(configs["three"], 2)
    assert largest_difference(alone, rows, "loss") < 1e-5 and largest_difference(alone, rows, "grad_norm") < 1e-4
    records = [
        [line for line in read_metrics(Path(c.run.storage) / c.run.name / "metrics.jsonl") if line["kind"] == "step"]
        for c in configs.values()
    ]
    for one, other in zip(*records, strict=True):
        assert len(one["expert_load"]) == 2 and all(1 <= load <= 3 for load in one["expert_load"])
        # Rounding may send a token elsewhere: of some 700 choices in a step and layer, one is 1 % of a mean.
        assert one["expert_load"] == pytest.approx(other["expert_load"], rel=0.02)
        assert step_values(one)["train/expert_load/max"] == max(one["expert_load"])
    without = trajectory(config_of(tmp_path, "without", {}, **sections), 1, stop_after=2)
    assert all(a["loss"] > b["loss"] + 0.05 for a, b in zip(alone[:2], without, strict=True)), "they do nothing"


@pytest.mark.parametrize(
    ("loss", "compiled"),
    [pytest.param(*each, marks=SLOW) for each in (("chunked", False), ("plain", False), ("chunked", True))],
)
def test_resume_is_bit_equal_and_heads_agree(tmp_path: Path, loss: str, compiled: bool) -> None:
    """In bf16 on two ranks."""
    sections: Any = {
        "parallel": {"precision": "bf16", "compile": compiled},
        "model": {"loss": loss, "init": "random", "architecture": LLAMA, "tokenizer": str(tmp_path / "tokenizer")},
    }
    whole = trajectory(config_of(tmp_path, "whole", ALL, **sections), 2)
    stopped = config_of(tmp_path, "stopped", ALL, **sections)
    trajectory(stopped, 2, stop_after=3)
    assert trajectory(stopped, 2) == whole
    other = {**sections, "model": {**sections["model"], "loss": "plain" if loss == "chunked" else "chunked"}}
    rows = trajectory(config_of(tmp_path, "other", ALL, **other), 2, stop_after=2)
    assert largest_difference(whole[:2], rows, "loss") < 1e-3


def test_it_is_another_run_and_evaluations_are_without_it(tmp_path: Path) -> None:
    """At a rate of nothing, every step is on the same weights: the loss has all of it, the evaluation has none."""
    data = {"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}
    make_config(tmp_path)
    found = {}
    for name, more in (("with", ALL), ("without", {})):
        config = config_of(
            tmp_path, name, {**more, "max_steps": 2}, architecture=GPT2, optim={"lr": 1e-30, "weight_decay": 0.0},
            eval={"every": 2},
            data={"train": [data], "eval": [data], "seq_len": 48, "window": 32},
        )  # fmt: skip
        trajectory(config, 1)
        lines = read_metrics(Path(config.run.storage) / name / "metrics.jsonl")
        found[name] = [line["trajectory"]["loss"] if line["kind"] == "step" else line["values"] for line in lines]
    assert found["with"][-1] == found["without"][-1]
    assert all(a != b for a, b in zip(found["with"][:-1], found["without"][:-1], strict=True))
    values = config.model_dump()
    values["train"]["label_smoothing"] = 0.2
    with pytest.raises(ResumeError, match=r"train\.label_smoothing: was 'not set', is 0\.2"):
        prepare(FinetuneConfig.model_validate(values), 1)
