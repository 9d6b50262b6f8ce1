"""Bases that are stored quantized: what is loaded is, bit for bit, what transformers dequantizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.run.publish import publish
from tests.checkpoints import checkpoints, tensors_in
from tests.loading import assert_same, gathered, load
from tests.models import build, save_checkpoint
from tests.quantized import by_transformers, save_fp8, save_mxfp4, spread
from tests.ranks import resident_ranks
from tests.runs import make_config, trajectory

pytest.importorskip("accelerate", reason="transformers wants it for FP8")

SLOW = pytest.mark.slow
MODES = ("sharded", "rank0")
# Shapes that blocks divide: where they do not, transformers takes other blocks than those that were quantized.
SIZES = {"moe_intermediate_size": 48}


def _check(root: Path, names: Sequence[str]) -> None:
    for name in names:
        expected = by_transformers(root / name).state_dict()
        for mode in MODES:
            for precision, dtype in (("bf16", torch.float32), ("bf16_pure", torch.bfloat16)):
                found = gathered(load(root / name, mode, parallel={"precision": precision}))
                wanted = {key: tensor.to(found[key].dtype) for key, tensor in expected.items()}
                assert_same(found, wanted, f"{name} {mode} {precision}")
                assert all(tensor.dtype == dtype for key, tensor in found.items() if "correction" not in key)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=SLOW)])
def test_every_mode_loads_what_transformers_dequantizes(tmp_path: Path, world: int) -> None:
    save_mxfp4(tmp_path / "mxfp4")
    save_fp8(tmp_path / "llama", "llama", (16, 16))
    save_fp8(tmp_path / "tensor", "llama", None)
    save_fp8(tmp_path / "qwen3_moe", "qwen3_moe", (16, 16), **SIZES)
    save_fp8(tmp_path / "deepseek_v3", "deepseek_v3", (16, 16), **SIZES)
    resident_ranks(_check, world, tmp_path, ["mxfp4", "llama", "tensor", "qwen3_moe", "deepseek_v3"])


def _check_ragged(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    for mode in MODES:
        found = gathered(load(directory, mode))
        assert_same(found, {key: expected[key].float() for key in found}, mode)


def test_blocks_that_do_not_divide_a_matrix(tmp_path: Path) -> None:
    """The last of a row or column of blocks is smaller, and the rows of a rank begin within one."""
    sizes = {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 40}
    directory = save_fp8(tmp_path / "model", "qwen3_moe", (128, 128), **sizes)
    files = find_weights(directory)
    tensors = {key: tensor for name in files.sizes() for key, tensor in load_file(directory / name).items()}
    plain = {}
    theirs = getattr(finegrained_fp8, "_dequantize_fp8_weight", None)  # transformers 5.17 does not have it
    for key in files.tensors():
        scales = tensors.get(f"{key}_scale_inv")
        if scales is not None:
            number = spread(scales, tensors[key].shape, (128, 128))
            plain[key] = (tensors[key].float() * number).bfloat16()
            if theirs is not None:
                assert torch.equal(plain[key], theirs(tensors[key], scales, [128, 128], torch.float32).bfloat16())
        else:
            plain[key] = tensors[key]
    original = save_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes)
    for key, tensor in load_file(original / "model.safetensors").items():
        assert torch.allclose(plain[key].float(), tensor, rtol=0.07, atol=0.01), "as before it was quantized, about"
    save_file(plain, original / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16).state_dict()
    resident_ranks(_check_ragged, 3, directory, expected)


def _fails(directory: Path) -> list[str]:
    messages = []
    for mode in MODES:
        with pytest.raises(ModelError) as failure:
            load(directory, mode)
        messages.append(str(failure.value))
    return messages


def test_scales_that_are_no_numbers_are_refused_on_every_rank(tmp_path: Path) -> None:
    directory = save_mxfp4(tmp_path / "model")
    key, file = "model.layers.1.mlp.experts.down_proj_scales", directory / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    tensors[key][3, 5, 1] = 255  # of an expert that the second rank keeps
    save_file(tensors, file, metadata={"format": "pt"})
    for message in sum(resident_ranks(_fails, 2, directory), []):
        assert f"{key} in {file} has values that are not finite" in message


TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 2}
LORA = {"type": "lora", "rank": 4, "alpha": 8}
EXPERTS = {**LORA, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def config_of(directory: Path, base: Path, name: str, **sections: Any) -> FinetuneConfig:
    tokenizer = make_config(directory).model.tokenizer
    values = {"path": str(base), "tokenizer": tokenizer, "init": "pretrained", "architecture": None}
    sections = {"parallel": {"precision": "bf16"}, "train": TRAIN, **sections}
    return make_config(directory, run={"name": name}, model=values, **sections)


def run_dir(config: FinetuneConfig) -> Path:
    return Path(config.run.storage) / config.run.name


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that are stored quantized, and each in 16 bits, dequantized by transformers."""
    root = tmp_path_factory.mktemp("bases")
    save_mxfp4(root / "gpt_oss")
    save_fp8(root / "qwen3_moe", "qwen3_moe", (16, 16), **SIZES)
    for name, sizes in (("gpt_oss", {}), ("qwen3_moe", SIZES)):
        plain = build(name, **sizes).bfloat16()  # transformers 5.23 cannot save experts that it has dequantized
        plain.load_state_dict(by_transformers(root / name).state_dict())
        plain.save_pretrained(root / f"{name}-bf16")
    return root


@SLOW  # weights that are equal to the bit, as above, are trained as all others are
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gpt_oss", {**EXPERTS, "type": "qlora"}),
        ("qwen3_moe", {"type": "full"}),
        ("gpt_oss", EXPERTS),
        ("gpt_oss", {"type": "full"}),
        ("qwen3_moe", EXPERTS),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_training_is_that_of_the_model_in_16_bits(
    bases: Path, tmp_path: Path, name: str, method: dict[str, Any]
) -> None:
    if method["type"] != "full":
        pytest.importorskip("peft")
    of = {"method": method}
    expected = trajectory(config_of(tmp_path, bases / f"{name}-bf16", "plain", **of), 2)
    ours = config_of(tmp_path, bases / name, "quantized", **of)
    assert trajectory(ours, 2) == expected
    # What was saved, too: the losses of two steps do not show the last update.
    found, wanted = (tensors_in(checkpoints(tmp_path / "runs" / each)[-1]) for each in ("quantized", "plain"))
    assert_same(found, wanted, name)
    alone = [trajectory(config_of(tmp_path, bases / each, f"{each}-1", **of), 1) for each in (name, f"{name}-bf16")]
    assert alone[0] == alone[1]
    # The weights are in 16 bits now, and whoever loads them must not look for scales.
    assert "quantization_config" not in (run_dir(ours) / "model" / "config.json").read_text()


def test_what_leaves_a_run_is_in_16_bits(bases: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, bases / "gpt_oss", "full")
    trajectory(config, 2)
    publish(find_checkpoint(run_dir(config)), tmp_path / "exported", ExportConfig())
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    saved = tensors_in(checkpoints(run_dir(config))[-1])
    wanted = {name.removeprefix("model."): t.bfloat16() for name, t in saved.items() if name.startswith("model.")}
    assert_same(exported.state_dict(), wanted, "exported")
    inferred = load_for_inference(run_dir(config), torch.device("cpu"))[0].bfloat16()
    assert_same(inferred.state_dict(), wanted, "inferred")


def test_adapters_beside_a_quantized_base(bases: Path, tmp_path: Path) -> None:
    """The checkpoint names the stored files; a merge is that of the 16-bit weights; PEFT loads the adapter."""
    peft = pytest.importorskip("peft")
    config = config_of(tmp_path, bases / "gpt_oss", "lora", method=EXPERTS)
    trajectory(config, 2)
    checkpoint = find_checkpoint(run_dir(config))
    base = read_state(checkpoint).base
    assert base is not None and base["path"] == str(bases / "gpt_oss")
    assert base["files"].keys() == find_weights(bases / "gpt_oss").sizes().keys()
    publish(checkpoint, tmp_path / "adapter", ExportConfig())
    publish(checkpoint, tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    plain = AutoModelForCausalLM.from_pretrained(bases / "gpt_oss-bf16", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert_same(merged, theirs, "merged")
    for place in (run_dir(config), tmp_path / "adapter"):
        model = load_for_inference(place, torch.device("cpu"))[0]
        found = {name: tensor.float() for name, tensor in model.state_dict().items()}
        assert_same(found, theirs, str(place))
        assert not hasattr(model.config, "quantization_config")
        out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
        assert out.shape == (1, 6)
