"""Random weights and the new rows of a grown embedding: the same at every world size, and what they should be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.config import ExportConfig, ModelConfig
from raytune_fsdp.model.network import fit_vocabulary, load_architecture
from raytune_fsdp.run.publish import publish
from tests.checkpoints import checkpoints, tensors_in
from tests.loading import FULL, assert_same, draw, gathered, load
from tests.models import TIED, VOCABULARY, architecture, save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import make_config, train_rank, write_tokenizer

WIDE = {
    "llama": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.03},
    "gpt2": {"n_embd": 128, "n_layer": 3, "initializer_range": 0.03},
    "gemma3_text": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.03},
    "phi": {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.03},
    "stablelm": {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.03},
}
"""Enough numbers in every matrix to tell its standard deviation within 5 %."""


def _digests(names: list[str], seed: int, layouts: list[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A hash of every tensor of every network, for each way to spread them."""
    found: list[dict[str, str]] = []
    for parallel in layouts:
        found.append({})
        for name in names:
            for key, tensor in gathered(draw(architecture(name), seed, parallel=parallel)).items():
                found[-1][f"{name} {key}"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    return found


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_random_weights_do_not_depend_on_the_ranks(world: int) -> None:
    names = ["llama", "gpt2", "gemma3_text", "mixtral", "gpt_oss", *(["phi", "gpt_neox"] if world == 2 else [])]
    ((expected,),) = resident_ranks(_digests, 1, names, 7, [FULL])
    for (found,) in resident_ranks(_digests, world, names, 7, [FULL]):
        assert found == expected
    layouts = [{"strategy": "hybrid_shard", "shard_size": 2}, {"strategy": "replicate"}]
    for hybrid, replicated in resident_ranks(_digests, 4, ["llama", "gpt2"], 7, layouts):
        assert hybrid == replicated and hybrid.items() <= expected.items()


def test_another_seed_draws_other_weights() -> None:
    ((first,),) = resident_ranks(_digests, 1, ["llama", "gpt2"], 7, [FULL])
    ((second,),) = resident_ranks(_digests, 1, ["llama", "gpt2"], 8, [FULL])
    constant = ("norm", "ln_", "bias")
    same = [key for key in first if first[key] == second[key]]
    assert same and all(any(part in key for part in constant) for key in same), same
    drawn = {key: digest for key, digest in first.items() if key not in same and "lm_head" not in key}
    assert len(set(drawn.values())) == len(drawn), "two tensors were drawn alike"


def _statistics(name: str) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of every tensor, for our weights and for those of transformers."""
    values = architecture(name, **WIDE[name])
    config = load_architecture(ModelConfig(init="random", architecture=values), None)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).state_dict()
    ours = gathered(draw(values, 3))
    assert ours.keys() == theirs.keys()
    found = {}
    for key, tensor in theirs.items():
        if tensor.std() == 0 or tensor.numel() < 1000:
            assert torch.equal(ours[key], tensor), f"{key}: a constant of transformers' is not one of ours"
        else:
            close = 4 / (2 * tensor.numel()) ** 0.5  # four standard errors, of both
            assert abs(ours[key].std() / tensor.std() - 1) < max(close, 0.02), key
            found[key] = (ours[key].mean().item(), ours[key].std().item())
        assert torch.equal((ours[key] == 0).all(-1), (tensor == 0).all(-1)), f"{key}: other rows are zero"
    return found


@pytest.mark.parametrize("name", WIDE)
def test_random_weights_are_drawn_as_transformers_draws_them(name: str) -> None:
    """Constants (norms, biases) are the same; of the rest, deviation and rows of zeros (the padding token's) are."""
    (found,) = resident_ranks(_statistics, 1, name)
    spread = WIDE[name]["initializer_range"]
    residual = spread / (2 * WIDE[name]["n_layer"]) ** 0.5 if name == "gpt2" else None
    assert len(found) > 10
    for key, (mean, deviation) in found.items():
        expected = residual if residual and "c_proj" in key else spread
        assert deviation == pytest.approx(expected, rel=0.05), key
        assert abs(mean) < 0.05 * spread, key


def _refusals(root: Path, names: list[str]) -> list[tuple[str, str]]:
    found = []
    for name in names:
        for mode in ("sharded", "rank0"):
            with pytest.raises(ModelError) as failure:
                load(root / name, mode)
            found.append((name, str(failure.value)))
    return found


def test_weights_that_are_not_finite_are_named_on_every_rank(tmp_path: Path) -> None:
    """One number in the rows of the last rank; one in an expert, which is stored apart and loaded with others."""
    broken = {"llama": "lm_head.weight", "mixtral": "model.layers.1.block_sparse_moe.experts.4.w2.weight"}
    files = {}
    for (name, key), value in zip(broken.items(), (torch.nan, torch.inf), strict=True):
        save_checkpoint(tmp_path / name, name, max_shard_size="60KB")
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())["weight_map"]
        files[name] = tmp_path / name / index[key]
        tensors = load_file(files[name])
        tensors[key][-1, -1] = value
        save_file(tensors, files[name], {"format": "pt"})
    for found in resident_ranks(_refusals, 2, tmp_path, list(broken)):
        assert len(found) == 4
        for name, message in found:
            assert message.startswith(f"{broken[name]} in {files[name]} has values that are not finite"), message


def _check_all_grown(root: Path, names: list[str]) -> None:
    for name in names:
        for vocabulary in (VOCABULARY + 1, 3 * VOCABULARY):  # new rows only on the last rank; a rank without old ones
            _check_grown(root / name, name, vocabulary)


def _check_grown(directory: Path, name: str, vocabulary: int) -> None:
    before = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    for mode in ("sharded", "rank0"):
        model = load(directory, mode, vocabulary=vocabulary)
        after = gathered(model)
        grown = {key for key in before if after[key].shape != before[key].shape}
        embeddings = {key for key in before if before[key].shape[:1] == (VOCABULARY,)}
        assert grown == embeddings and len(grown) >= 1
        kept = {key: tensor[:VOCABULARY] if key in grown else tensor for key, tensor in after.items()}
        assert_same(kept, before, f"{name} {mode}")
        for key in grown:
            mean = before[key].double().sum(0).div(VOCABULARY).to(before[key].dtype)
            assert torch.equal(after[key][VOCABULARY:], mean.expand(vocabulary - VOCABULARY, *mean.shape)), key
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (name in TIED)
        tokens = torch.arange(vocabulary).view(1, -1)[:, -100:]
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens, use_cache=False).logits
        assert logits.shape == (1, 100, vocabulary) and torch.isfinite(logits).all()


@pytest.mark.parametrize("world", [1, 3])
def test_grown_embeddings_keep_old_rows_and_start_new_ones_at_the_mean(tmp_path: Path, world: int) -> None:
    names = ["gemma3_text", "phi", *(["llama"] if world == 1 else [])]  # phi's head has a bias as long as it, too
    for name in names:
        save_checkpoint(tmp_path / name, name)
    resident_ranks(_check_all_grown, world, tmp_path, names)


def test_a_tokenizer_with_more_tokens_is_refused_unless_asked_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    config = load_architecture(ModelConfig(path=str(tmp_path)), tmp_path)
    fit_vocabulary(config, 100, resize=True)
    fit_vocabulary(config, VOCABULARY, resize=False)
    assert config.vocab_size == VOCABULARY, "never shrunk"
    with pytest.raises(ModelError) as failure:
        fit_vocabulary(config, 140, resize=False)
    message = str(failure.value)
    assert "ids up to 139" in message and "131 tokens" in message and "model.resize_embeddings=true" in message


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # whose head is a matrix of its own, and whose head is tied
def test_added_tokens_start_the_same_at_any_world_size_and_are_exported(tmp_path: Path, name: str) -> None:
    model = write_tokenizer(save_checkpoint(tmp_path / "model", name, vocab_size=64))
    tokens = [{"text": "<call>", "special": True, "like": "w3 w9"}, "tram"]
    stored = AutoModelForCausalLM.from_pretrained(model).state_dict()
    found = []
    for world in (1, 3):
        config = make_config(
            tmp_path,
            run={"name": f"world-{world}"},
            model={"path": str(model), "init": "pretrained", "architecture": None, "tokenizer": None},
            parallel={"precision": "fp32"},
            optim={"lr": 1e-30, "weight_decay": 0.0},
            train={"global_batch": 10, "micro_batch": 2, "max_steps": 1},
        ).model_dump()
        config["model"]["add_tokens"] = tokens
        resident_ranks(train_rank, world, config)
        (checkpoint,) = checkpoints(tmp_path / "runs" / f"world-{world}")
        found.append({key.removeprefix("model."): t for key, t in tensors_in(checkpoint).items()})
    for key in ("model.embed_tokens.weight", *(["lm_head.weight"] if name == "llama" else [])):
        one, three = (tensors[key] for tensors in found)
        assert torch.equal(one, three) and one.shape == (66, 32)
        old = stored[key].double()
        assert torch.equal(one[:64], stored[key])
        assert torch.equal(one[64], old[[3, 9]].mean(0).float())
        assert torch.equal(one[65], old.sum(0).div(64).float())
    publish(checkpoint, tmp_path / "export", ExportConfig(dtype="trained"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer("w1 tram <call>")["input_ids"] == [1, 65, 64]
    assert tokenizer.decode([1, 65, 64], skip_special_tokens=True) == "w1 tram"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.config.vocab_size == 66 and exported(input_ids=torch.tensor([[1, 65, 64]])).logits.isfinite().all()
