"""Loading is exact: what a sharded network holds is, bit for bit, what from_pretrained loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.starting_weights import fill_mode
from tests.loading import CPU, assert_same, gathered, load
from tests.models import ARCHITECTURES, EXPERTS, TIED, UNUSUAL, VOCABULARY, build, save_checkpoint
from tests.ranks import resident_ranks

SLOW = pytest.mark.slow
MODES = ("sharded", "rank0")
LIKE_OTHERS = ["mistral", "olmo2", "starcoder2", "stablelm", "zamba"]
"""Whose tensors are of the same kinds as those of llama, qwen3, phi and zamba2. One rank loads the first four."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every architecture, in several files each."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in (*ARCHITECTURES, *EXPERTS, *UNUSUAL):
        save_checkpoint(root / name, name, max_shard_size="20KB")
        assert len(list((root / name).glob("*.safetensors"))) > 3
    return root


def _check_all(root: Path, names: list[str]) -> None:
    for name in names:
        expected = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
        for mode in MODES:
            _check(load(root / name, mode), expected, f"{name} {mode}", tied=name in TIED)


def _check(model: Any, expected: Any, what: str, *, tied: bool) -> None:
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied, what
    assert_same(gathered(model), expected.state_dict(), what)
    assert_same(dict(model.named_buffers()), dict(expected.named_buffers()), what)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]), what
    tokens = torch.arange(20).view(1, 20) * 7 % VOCABULARY
    with torch.no_grad():
        found = model.eval()(input_ids=tokens, use_cache=False).logits
        assert torch.equal(found, expected(input_ids=tokens, use_cache=False).logits), what
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied, what


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(1, [*ARCHITECTURES, *EXPERTS], id="1"),
        pytest.param(3, [name for name in (*ARCHITECTURES, *EXPERTS, *UNUSUAL) if name not in LIKE_OTHERS], id="3"),
        pytest.param(3, LIKE_OTHERS, id="3-like-others", marks=SLOW),
        *(pytest.param(world, [*ARCHITECTURES, *EXPERTS], id=str(world), marks=SLOW) for world in (2, 4)),
    ],
)
def test_every_architecture_and_mode_loads_exactly(checkpoints: Path, world: int, names: list[str]) -> None:
    resident_ranks(_check_all, world, checkpoints, names)


def _check_strategies(root: Path, name: str, strategies: list[Mapping[str, Any]]) -> None:
    expected = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
    for parallel in strategies:
        for mode in MODES:
            model = load(root / name, mode, parallel=parallel)
            _check(model, expected, f"{name} {mode} {parallel}", tied=name in TIED)


def test_hybrid_and_replicated_layouts_load_exactly(checkpoints: Path) -> None:
    hybrid = {"strategy": "hybrid_shard", "shard_size": 2}
    resident_ranks(_check_strategies, 4, checkpoints, "gemma3_text", [hybrid, {"strategy": "replicate"}])


def _check_types(directory: Path, precisions: dict[str, torch.dtype]) -> None:
    for precision, dtype in precisions.items():
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        for mode in MODES:
            model = load(directory, mode, parallel={"precision": precision})
            assert_same(gathered(model), expected.state_dict(), f"{precision} {mode}")


def _check_weights(root: Path, names: list[str]) -> None:
    for name in names:
        expected = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).state_dict()
        for mode in MODES:
            assert_same(gathered(load(root / name, mode)), expected, f"{name} {mode}")


def test_weights_whose_rows_are_rearranged_load_exactly(tmp_path: Path) -> None:
    """One tensor in the files becomes several of the network's (hrm_text), or several become one (olmo_hybrid)."""
    for name, keys in {"hrm_text": ("gqkv_proj", "gate_up_proj"), "olmo_hybrid": ("q_conv1d", "v_conv1d")}.items():
        save_checkpoint(tmp_path / name, name)
        stored = load_file(tmp_path / name / "model.safetensors")
        assert all(any(key in each for each in stored) for key in keys), sorted(stored)
    resident_ranks(_check_weights, 3, tmp_path, ["hrm_text", "olmo_hybrid"])


def test_weights_stored_in_bf16_become_masters_of_the_precision(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    masters = {"bf16": torch.float32, "fp64": torch.float64, "bf16_pure": torch.bfloat16}
    resident_ranks(_check_types, 2, tmp_path, masters)


def test_what_architectures_keep_in_fp32(tmp_path: Path) -> None:
    """A router's bias of DeepSeek V3 is a buffer; where it is a weight, FSDP could not shard it with the others."""
    save_checkpoint(tmp_path / "deepseek_v3", "deepseek_v3")
    resident_ranks(_check_types, 2, tmp_path / "deepseek_v3", {"bf16_pure": torch.bfloat16})
    save_checkpoint(tmp_path / "ernie4_5_moe", "ernie4_5_moe")
    for message in resident_ranks(_load_fails, 1, tmp_path / "ernie4_5_moe", "bf16_pure"):
        assert "precision=bf16_pure: Ernie4_5_MoeForCausalLM keeps model.layers.1.mlp.gate." in message
        assert "use parallel.precision=bf16," in message


def test_experts_that_are_stored_in_different_types(tmp_path: Path) -> None:
    """What is put together becomes what both can be told in, as in transformers, however large it is."""
    save_checkpoint(tmp_path / "qwen3_moe", "qwen3_moe", hidden_size=512, moe_intermediate_size=256)
    file = tmp_path / "qwen3_moe" / "model.safetensors"
    tensors = load_file(file)
    mixed = {key: t.bfloat16() if "gate_proj" in key or "experts.0." in key else t for key, t in tensors.items()}
    save_file(mixed, file, metadata={"format": "pt"})
    resident_ranks(_check_weights, 2, tmp_path, ["qwen3_moe"])


def test_a_checkpoint_of_the_bare_decoder_loads(tmp_path: Path) -> None:
    for name in ("gemma3_text", "gpt2"):
        build(name).base_model.save_pretrained(tmp_path / name)
        AutoModel.from_pretrained(tmp_path / name)
        stored = load_file(tmp_path / name / "model.safetensors")
        assert not any(key.startswith(("model.", "transformer.", "lm_head")) for key in stored), sorted(stored)
    resident_ranks(_check_all, 2, tmp_path, ["gemma3_text", "gpt2"])


def test_a_tied_weight_may_be_stored_under_its_other_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "qwen3", "qwen3")
    file = tmp_path / "qwen3" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    resident_ranks(_check_all, 2, tmp_path, ["qwen3"])


def _load_fails(directory: Path, precision: str = "fp32") -> str:
    with pytest.raises(ModelError) as failure:
        load(directory, "sharded", parallel={"precision": precision})
    return str(failure.value)


def test_an_untied_head_that_is_missing_is_an_error(tmp_path: Path) -> None:
    build("llama").base_model.save_pretrained(tmp_path)
    (message,) = resident_ranks(_load_fails, 1, tmp_path)
    assert "1 missing (lm_head.weight)" in message and str(tmp_path) in message


def _config(directory: Path, storage: Path, fill: str) -> FinetuneConfig:
    from raytune_fsdp.demo import CONVERSATIONS

    return FinetuneConfig.model_validate(
        {
            "run": {"name": "loading", "storage": str(storage)},
            "model": {"path": str(directory), "fill": fill},
            "data": {"train": [{"path": str(CONVERSATIONS)}], "seq_len": 128, "window": 64},
            "parallel": {"precision": "fp32"},
            "train": {"global_batch": 4, "max_steps": 1},
            "tracking": {"console": False, "mlflow": {"enabled": False}},
        }
    )


def _assemble(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, sighted: bool) -> tuple[str, Any]:
    """Which mode was chosen, and the network; the ranks that are not `sighted` have no such directory."""
    assert prepared.origin is not None and isinstance(prepared.origin.stored, WeightFiles)
    if dist.get_rank() and not sighted:
        unseen = replace(prepared.origin.stored, directory=Path("/nowhere/to/be/seen"))
        prepared = replace(prepared, origin=replace(prepared.origin, stored=unseen))
    assert prepared.origin is not None
    return fill_mode(config, prepared.origin), assemble(config, prepared, standing, CPU).model


def _check_assembled(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, sighted: bool) -> str:
    mode, model = _assemble(config, prepared, standing, sighted)
    expected = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    assert_same(gathered(model), expected.state_dict(), mode)
    return mode


@pytest.mark.parametrize(
    ("fill", "sighted", "chosen"), [("auto", True, "sharded"), ("auto", False, "rank0"), ("rank0", False, "rank0")]
)
def test_rank0_is_enough_to_see_the_files(tmp_path: Path, fill: str, sighted: bool, chosen: str) -> None:
    save_checkpoint(tmp_path / "model", "gpt2", tokenizer=True, vocab_size=1024, max_shard_size="50KB")
    config = _config(tmp_path / "model", tmp_path, fill)
    assert resident_ranks(_check_assembled, 3, config, *prepare(config, 3), sighted) == [chosen] * 3


def _refused(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint) -> str:
    with pytest.raises(ModelError) as failure:
        _assemble(config, prepared, standing, sighted=False)
    return str(failure.value)


def test_sharded_refuses_where_a_rank_cannot_see_the_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "gpt2", tokenizer=True, vocab_size=1024)
    config = _config(tmp_path / "model", tmp_path, "sharded")
    messages = resident_ranks(_refused, 2, config, *prepare(config, 2))
    for message in messages:
        assert "model.fill=sharded" in message and "rank(s) [1]" in message and "model.fill=rank0" in message
