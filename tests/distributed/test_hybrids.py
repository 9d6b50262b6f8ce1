"""Hybrids train packed: their runs are as exact as those of networks that have attention alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.model.adapters.attach import adapted_modules, adapter_tensors
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.run.beginning import put_beginning
from raytune_fsdp.run.publish import publish
from tests.models import architecture, save_checkpoint
from tests.runs import largest_difference, make_config, trajectory

SLOW = pytest.mark.slow
BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4}
"""Of worlds 1 and 2, in fp32."""
STEPS, STOP = 4, 2
LORA = {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.1}


def config_of(home: Path, name: str, run: str, **sections: Any) -> FinetuneConfig:
    model: dict[str, Any] = {"init": "pretrained", "architecture": None, "path": str(home / "base")}
    if name != "qwen3_5" and "method" not in sections:  # of the first there are only models that see
        model = {"init": "random", "architecture": architecture(name, vocab_size=64)}
    elif not (home / "base").exists():
        save_checkpoint(home / "base", name)
    given: dict[str, Any] = {
        "run": {"name": run, "storage": str(home / "runs"), "seed": 3},
        "model": {"tokenizer": str(home / "tokenizer"), **model},
        "parallel": {"precision": "fp32", "activation_checkpointing": "full"},
        "optim": {"lr": 1e-2, "warmup_ratio": 0.0},
        "checkpoint": {"every": STOP, "asynchronous": False},
        "train": {"global_batch": 6, "micro_batch": 2, "max_steps": STEPS},
        "eval": {"every": STEPS},
    }
    data = {
        "eval": [{"name": "heldout", "path": str(home / "tokens.jsonl"), "format": {"type": "tokens"}}],
        "train": [{"path": str(home / "tokens.jsonl"), "format": {"type": "tokens"}}], "seq_len": 48, "window": 32,
    }  # fmt: skip
    return make_config(home, **{**given, "data": data, **sections})


def kernels(config: FinetuneConfig) -> dict[str, Any]:
    events = read_events(Path(config.run.storage) / config.run.name / "events.jsonl")
    return next(dict(event["fields"]) for event in events if event["event"] == "kernels")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen3_next", {}),
        pytest.param("falcon_h1", LORA, marks=SLOW),
        pytest.param("qwen3_next", LORA, marks=SLOW),
        *(
            pytest.param(name, {}, marks=SLOW)
            for name in (
                "qwen3_5_text", "qwen3_5", "falcon_h1", "granitemoehybrid", "nemotron_h", "jamba", "lfm2", "bamba",
                "zamba2", "mamba2",
            )
        ),
    ],
)  # fmt: skip
def test_it_trains_packed_at_any_world_and_goes_on_and_is_exported(
    tmp_path: Path, name: str, method: dict[str, Any]
) -> None:
    if method:
        pytest.importorskip("peft")
    sections = {"method": method} if method else {}
    two = config_of(tmp_path, name, "two", **sections)
    rows = trajectory(two, 2)
    chosen = kernels(two)
    assert chosen["mixers"] == "by_document" and "would run on into the next document" in chosen["mixers_why"]
    assert chosen["attention"] == "documents_cpu"
    alone = trajectory(config_of(tmp_path, name, "one", **sections), 1)
    assert [row["samples"] for row in rows] == [row["samples"] for row in alone]
    for key, bound in BOUNDS.items():
        assert largest_difference(rows, alone, key) < bound, key
    stopped = config_of(tmp_path, name, "stopped", **sections)
    trajectory(stopped, 2, stop_after=STOP)
    assert trajectory(stopped, 2) == rows, "a continued run is the same, bit for bit"
    ours, _ = load_for_inference(tmp_path / "runs" / "two", torch.device("cpu"))
    publish(find_checkpoint(tmp_path / "runs" / "two"), tmp_path / "export", ExportConfig(dtype="fp32", merge=True))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert torch.equal(*(_logits(model) for model in (found, ours)))


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(7, 27)[None], use_cache=False).logits
    return found


@SLOW
def test_a_run_whose_adapters_were_on_more_layers_goes_on_with_these(tmp_path: Path) -> None:
    """Older versions adapted `dt_proj`, too, whose weight Jamba's code reads past an adapter."""
    pytest.importorskip("peft")

    def run(name: str) -> FinetuneConfig:
        train = {"global_batch": 2, "micro_batch": 2, "max_steps": 2}
        sections = {"train": train, "checkpoint": {"every": 1, "asynchronous": False}, "eval": {"every": 2}}
        return config_of(tmp_path, "jamba", name, method={"type": "lora", "rank": 2, "init": "pissa"}, **sections)

    def held(name: str) -> list[str]:
        return adapted_modules(CheckpointWeights(find_checkpoint(RunDir.of(run(name)).path)).shapes())

    late, config = "model.layers.0.mamba.dt_proj", run("whole")
    now = adapted_modules(adapter_tensors(build_network(load_architecture(config.model, tmp_path / "base"), config)))
    assert late not in now
    older = sorted([*now, late])
    for name in ("whole", "stopped"):
        put_beginning(RunDir.of(run(name)), RunState(), older)  # as an audit has an older run begin
    whole = trajectory(config, 1)
    trajectory(run("stopped"), 1, stop_after=1)
    RunDir.of(run("stopped")).beginning.unlink()
    assert trajectory(run("stopped"), 1) == whole and held("stopped") == older
    written = json.loads((RunDir.of(run("stopped")).model_files / "adapter_config.json").read_text())
    assert "dt_proj" in written["target_modules"]
    publish(find_checkpoint(RunDir.of(run("stopped")).path), tmp_path / "export", ExportConfig(merge=True))


COMPILED = {"train": {"global_batch": 12, "micro_batch": 2, "max_steps": 6}}


@pytest.mark.slow  # two minutes of a compiler
def test_layers_are_compiled_around_mixers_with_no_graph_for_each_mixture_of_lengths(tmp_path: Path) -> None:
    plain = trajectory(config_of(tmp_path, "qwen3_next", "plain", **COMPILED), 1)
    parallel = {"precision": "fp32", "activation_checkpointing": "none", "compile": True}
    compiled = config_of(tmp_path, "qwen3_next", "compiled", **COMPILED, parallel=parallel)
    assert largest_difference(plain, trajectory(compiled, 1), "loss") < BOUNDS["loss"]
    assert kernels(compiled)["blocks"] == "compiled"
    events = read_events(tmp_path / "runs" / "compiled" / "events.jsonl")
    steps = [event["fields"]["step"] for event in events if event["event"] == "compiled"]
    assert max(steps, default=0) <= 3, "a graph was compiled after step 3"
    assert not any(event["event"] == "kernels_changed" for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "exact"), [("selective", False), ("none", True)])
def test_layers_that_must_be_one_graph_are_not_compiled_around_mixers(
    tmp_path: Path, recompute: str, exact: bool
) -> None:
    """torch cannot leave a graph inside of what is computed again, nor in an exact run, which has one for all ranks."""
    parallel = {"precision": "fp32", "activation_checkpointing": recompute, "compile": True}
    config = config_of(tmp_path, "lfm2", "again", parallel=parallel)
    config = config.model_copy(update={"run": config.run.model_copy(update={"exact": exact})})
    trajectory(config, 1)
    chosen = kernels(config)
    assert chosen["blocks"] == "eager" and "state mixers are called for documents" in chosen["blocks_why"]
