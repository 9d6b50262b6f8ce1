"""PiSSA and OLoRA: a run begins as its base, and what comes out is for the base as it is stored."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.config.sections.method import LoraMethod
from raytune_fsdp.model.adapters import principal
from raytune_fsdp.model.adapters.attach import initial_adapters
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.publish import publish
from tests.checkpoints import checkpoints, tensors_in
from tests.distributed.test_adapters import FOR_FOUR, LORA, config_of, run_dir
from tests.ranks import resident_ranks
from tests.runs import largest_difference, trajectory

pytest.importorskip("peft")

SLOW = pytest.mark.slow
FP32: Any = {"parallel": {"precision": "fp32"}}


@pytest.mark.parametrize(
    ("model", "init", "world"), [("llama", "pissa", 3), pytest.param("gpt2", "olora", 2, marks=SLOW)]
)
def test_it_begins_as_the_base_and_worlds_agree(tmp_path: Path, model: str, init: str, world: int) -> None:
    """Its first loss is that of adapters that change nothing; the second is not."""
    method = {**LORA, "init": init}
    whole = trajectory(config_of(tmp_path, model, method, name="1"), 1)
    plain = trajectory(config_of(tmp_path, model, LORA, name="plain"), 1)
    assert whole[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-7)
    assert abs(whole[-1]["loss"] - plain[-1]["loss"]) > 1e-6
    rows = trajectory(config_of(tmp_path, model, method, name="more"), world)
    assert largest_difference(whole, rows, "loss") < 1e-8
    assert largest_difference(whole, rows, "grad_norm") < 1e-6


@pytest.mark.parametrize(
    ("model", "method", "precision"),
    [
        pytest.param(
            "llama",
            {**LORA, "init": "pissa", "modules_to_save": ["lm_head"], "rank_stabilized": True},
            "fp32",
            marks=SLOW,
        ),
        pytest.param("gpt2", {**LORA, "init": "olora"}, "bf16_pure", marks=SLOW),
        ("llama", {**LORA, "type": "qlora", "init": "pissa"}, "bf16"),
    ],
)
def test_resume_is_bit_equal_and_the_export_is_a_plain_adapter(
    tmp_path: Path, model: str, method: dict[str, Any], precision: str
) -> None:
    """From what is in the checkpoint, also on other ranks, which read it in other pieces; PEFT merges it as we do."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sections: Any = {"parallel": {"precision": precision}}
    whole = trajectory(config_of(tmp_path, model, method, name="whole", **sections), 2)
    config = config_of(tmp_path, model, method, **sections)
    trajectory(config, 2, stop_after=3)
    stopped = shutil.copytree(run_dir(config), tmp_path / "stopped")
    assert largest_difference(whole, trajectory(config, 3), "loss") < (1e-5 if precision == "fp32" else 3e-2)
    shutil.rmtree(run_dir(config))
    stopped.rename(run_dir(config))
    assert trajectory(config, 2) == whole
    first, last = (tensors_in(checkpoints(run_dir(config))[each]) for each in (0, -1))
    begun = {name.removeprefix("initial."): tensor for name, tensor in last.items() if name.startswith("initial.")}
    assert begun and all(torch.equal(tensor, first[f"initial.{name}"]) for name, tensor in begun.items())
    assert not any(torch.equal(tensor, last[f"model.{name}"]) for name, tensor in begun.items())
    checkpoint = find_checkpoint(run_dir(config))
    publish(checkpoint, tmp_path / "adapter", ExportConfig())
    publish(checkpoint, tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (8, 16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / f"base-{model}", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload().state_dict()
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in ours.items():
        assert torch.allclose(merged[name], tensor, rtol=1e-5, atol=1e-6), name
    loaded, _ = load_for_inference(run_dir(config), torch.device("cpu"))
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dora": True}, "method.init=pissa cannot be used with method.dora=true: set method.init=zero, or leave"),
        ({"adapter": "somewhere"}, "method.init=pissa cannot be used with method.adapter=somewhere"),
        ({"target_parameters": ["experts.up"]}, "cannot be used with method.target_parameters="),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraMethod(type="lora", init="pissa", **changes)


def test_what_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", {**LORA, "init": "pissa", "rank": 17}, **FP32)
    with pytest.raises(ConfigError, match=r"k_proj.weight has the shape \(16, 32\), so no part of it has"):
        prepare(config, 1)
    file = tmp_path / "base-llama" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][40, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    config = config_of(tmp_path, "llama", {**LORA, "init": "pissa"}, **FP32)
    for fill in ("sharded", "rank0"):
        for said in resident_ranks(_begun, 2, _filled_by(config, fill), *prepare(config, 2), 0):
            assert re.search("model.layers.1.mlp.up_proj.weight in .* not finite", str(said)), fill


def _filled_by(config: FinetuneConfig, fill: str) -> FinetuneConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"fill": fill})})


def _begun(config: FinetuneConfig, prepared: Any, standing: Any, ahead: int) -> dict[str, str] | str:
    """The hash of every tensor as it begins, gathered. `ahead`: bytes of pairs that each rank has ready."""
    try:
        with mock.patch.object(principal, "_AHEAD", ahead):
            model = assemble(config, prepared, standing, torch.device("cpu")).model
    except ModelError as error:
        return str(error)
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in (
            *model.named_parameters(),
            *((f"initial.{n}", t) for n, t in initial_adapters(model).items()),
        )
    }
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in whole.items()
    }


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (300, 500), (1024, 256)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_decomposition_in_place_is_torchs(shape: tuple[int, int], turned: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = weight.T if turned else weight
    q, r = torch.linalg.qr(weight.float())
    b, a = principal._triangular(weight, 16)
    assert torch.equal(b, q[:, :16]) and torch.equal(a, r[:16])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "init"),
    [("llama", "qlora", "pissa"), ("gpt2", "lora", "olora"), ("gpt2", "qlora", "pissa")],
)
def test_who_takes_a_weight_apart_and_when_changes_no_bit(tmp_path: Path, model: str, kind: str, init: str) -> None:
    """One weight at a time or many ahead, by one rank or by all."""
    method = {**LORA, "type": kind, "init": init}
    config = config_of(tmp_path, model, method, parallel={"precision": "bf16"}, train=FOR_FOUR)
    (first,) = resident_ranks(_begun, 1, _filled_by(config, "sharded"), *prepare(config, 1), 16 << 20)
    assert any(name.startswith("initial.") for name in first)
    for world, fill, ahead in ((2, "sharded", 0), (2, "rank0", 0), (3, "sharded", 5_000), (4, "rank0", 16 << 20)):
        for found in resident_ranks(_begun, world, _filled_by(config, fill), *prepare(config, world), ahead):
            assert found == first, (world, fill, ahead)


def test_an_embedding_has_no_principal_part(tmp_path: Path) -> None:
    method = {**LORA, "init": "pissa", "target_modules": ["q_proj", "embed_tokens"]}
    with pytest.raises(ConfigError, match="method.init=pissa: model.embed_tokens is an embedding; leave it out"):
        prepare(config_of(tmp_path, "llama", method, **FP32), 1)
