"""Training on one GPU through the real path: precision, compilation, memory, reports. Needs no Ray and no MLflow."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.launch import local
from raytune_fsdp.record.jsonl import read_metrics
from raytune_fsdp.step.flops import peak_flops
from tests.checkpoints import checkpoints, types_in
from tests.runs import make_config, write_tokenizer, write_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
VOCABULARY = 512
ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def train(directory: Path, name: str, *, steps: int = 20, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Train on the GPU and return the lines of all steps. The texts use 32 of 512 tokens, which is soon learned."""
    if not (directory / "tokens.jsonl").exists():
        write_tokens(directory / "tokens.jsonl", rows=400, vocabulary=32, longest=200)
        write_tokenizer(directory / "tokenizer", VOCABULARY)
    config = make_config(
        directory,
        ARCHITECTURE,
        **{
            "run": {"name": name},
            "data": {"seq_len": 512},
            "train": {"global_batch": 8, "micro_batch": 4, "max_steps": steps},
            "cluster": {"device": DEVICE, "workers": 1},
            **sections,
            "parallel": {"compile": False, **sections.get("parallel", {})},  # to compile takes longer than to train
        },
    )
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    local.run(config)
    lines = read_metrics(Path(config.run.storage) / name / "metrics.jsonl")
    return [line for line in lines if line["kind"] == "step"]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["trajectory"]["loss"] for line in lines]


def test_bf16_learns_and_keeps_fp32_weights(tmp_path: Path) -> None:
    lines = train(tmp_path, "bf16", parallel={"precision": "bf16"})
    assert len(lines) == 20
    assert not any(line["skipped"] for line in lines)
    assert losses(lines)[0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert losses(lines)[-1] < 0.8 * losses(lines)[0]
    assert set(types_in(checkpoints(tmp_path / "runs" / "bf16")[-1]).values()) == {torch.float32}


def test_mfu_and_memory_are_reported(tmp_path: Path) -> None:
    device = torch.cuda.get_device_name()
    if peak_flops(device) is None:
        pytest.skip(f"the peak of {device} is not known, so no MFU is reported")
    for line in train(tmp_path, "reported", parallel={"precision": "bf16"}, steps=5):
        assert 0 < line["mfu"] < 1
        assert 0 < line["memory_bytes"] < torch.cuda.get_device_properties(0).total_memory
        assert line["tokens_per_second"] > 0


def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    exact = losses(train(tmp_path, "fp32", parallel={"precision": "fp32"}))
    assert losses(train(tmp_path, "bf16", parallel={"precision": "bf16"})) == pytest.approx(exact, rel=2e-2)


def test_compiled_is_near_eager(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="torch.compile needs Triton")
    eager = losses(train(tmp_path, "eager", parallel={"precision": "bf16"}))
    compiled = losses(train(tmp_path, "compiled", parallel={"precision": "bf16", "compile": True}))
    assert compiled == pytest.approx(eager, rel=2e-2)


def test_fp16_recovers_from_an_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytune_fsdp.run.assemble.FIRST_SCALE", 2.0**30)
    lines = train(tmp_path, "fp16", parallel={"precision": "fp16"}, optim={"max_skipped": 20}, steps=40)
    bad = [line["trajectory"]["step"] for line in lines if line["skipped"]]
    assert bad[:1] == [1], "the scale is far too large for the first step"
    assert bad[-1] <= 20, "and has found its size soon"
    assert all(map(math.isfinite, losses(lines)))
    assert losses(lines)[-1] < 0.8 * losses(lines)[0]


def test_activation_checkpointing_changes_memory_only(tmp_path: Path) -> None:
    kept = train(tmp_path, "kept", parallel={"precision": "fp32"})
    again = train(tmp_path, "again", parallel={"precision": "fp32", "activation_checkpointing": "full"})
    assert losses(again) == pytest.approx(losses(kept), rel=1e-3)  # kernels on a GPU add in no fixed order
    assert again[-1]["memory_bytes"] < kept[-1]["memory_bytes"]


def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", parallel={"precision": "bf16"}, optim={"schedule_steps": 20})
    train(tmp_path, "parted", parallel={"precision": "bf16"}, optim={"schedule_steps": 20}, steps=8)
    parted = train(tmp_path, "parted", parallel={"precision": "bf16"}, optim={"schedule_steps": 20})
    samples = [[line["trajectory"]["samples"] for line in lines] for lines in (whole, parted)]
    assert samples[0] == samples[1]
    assert losses(parted) == pytest.approx(losses(whole), rel=2e-2)
