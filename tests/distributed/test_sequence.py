"""Ranks that share each sample learn what one rank alone learns: `parallel.mesh.sequence`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.collectives import Collectives
from raytune_fsdp.base.collectives import make_device_mesh
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelChoice, logits_of, set_attention
from raytune_fsdp.model.proof import documents, error_of_parts
from raytune_fsdp.model.split.sequence import split_tokens
from raytune_fsdp.record.jsonl import read_evaluations
from raytune_fsdp.run.measure.documents import read_sums
from raytune_fsdp.step.traffic import exchanged_by_attention
from tests.models import save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, largest_difference, make_config, trajectory, write_tokens

SLOW = pytest.mark.slow
GPT2_4 = {**GPT2, "n_head": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
STEPS = 4
FP64, FP32 = (1e-10, 1e-10), (1e-5, 1e-4)
LLAMA_FP64 = (1e-8, 1e-6)


CASES = [
    # Four ranks with a head each, hidden dropout, a block that each of them has in parts; then keys and values of fewer
    # heads than ranks, in two copies of the model.
    pytest.param(GPT2_4, 4, 4, "fp64", {}, {}, FP64, id="gpt2-dropout", marks=SLOW),
    pytest.param(
        LLAMA, 4, 2, "fp32", {"strategy": "hybrid_shard", "shard_size": 2, "activation_checkpointing": "full"}, {},
        FP32, id="llama-hybrid",
    ),
    pytest.param(
        MIXTRAL, 2, 2, "fp32", {"activation_checkpointing": "selective"},
        {"router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001}, FP32, id="mixtral",
        marks=SLOW,
    ),
    pytest.param(LLAMA, 4, 4, "fp64", {}, {}, LLAMA_FP64, id="llama-keys-repeated", marks=SLOW),
    pytest.param(LLAMA, 4, 2, "fp64", {"strategy": "replicate"}, {}, LLAMA_FP64, id="llama-replicate", marks=SLOW),
    pytest.param(
        QWEN3, 2, 2, "fp64", {}, {"neftune_noise_alpha": 5.0, "label_smoothing": 0.1, "z_loss": 1e-4}, LLAMA_FP64,
        id="qwen3-noise", marks=SLOW,
    ),
    pytest.param(LLAMA, 8, 4, "fp32", {}, {}, FP32, id="llama-eight", marks=SLOW),
    pytest.param(
        LLAMA, 8, 2, "fp32", {"strategy": "hybrid_shard", "shard_size": 4}, {}, FP32, id="llama-both", marks=SLOW
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "world", "sequence", "precision", "parallel", "train", "bounds"), CASES)
def test_ranks_that_share_samples_learn_what_one_learns(
    tmp_path: Path,
    architecture: dict[str, Any],
    world: int,
    sequence: int,
    precision: str,
    parallel: dict[str, Any],
    train: dict[str, Any],
    bounds: tuple[float, float],
) -> None:
    check_learns_the_same(tmp_path, architecture, world, {"sequence": sequence}, precision, parallel, train, bounds)


def check_learns_the_same(
    directory: Path,
    architecture: Mapping[str, Any],
    world: int,
    mesh: Mapping[str, int],
    precision: str,
    parallel: Mapping[str, Any],
    train: Mapping[str, Any],
    bounds: tuple[float, float],
) -> None:
    """A mesh of ranks, and one rank alone: losses, norms, samples, evaluations, losses of documents. Packed documents
    and filler blocks are in it."""
    chosen = {"global_batch": 10, "micro_batch": 2, "max_steps": STEPS, **train}
    again = {key: value for key, value in parallel.items() if key == "activation_checkpointing"}
    write_tokens(directory / "others.jsonl", rows=9, seed=1)
    found = []
    for name, ranks, spread in (("alone", 1, again), ("shared", world, {**parallel, "mesh": mesh})):
        config = make_config(
            directory, architecture, train=chosen, parallel={"precision": precision, **spread},
            data={"eval": [{"path": str(directory / "others.jsonl"), "format": {"type": "tokens"}}]},
            eval={"every": 2}, run={"name": name}, tracking={"documents": True},
        )  # fmt: skip
        run = Path(config.run.storage) / name
        found.append((trajectory(config, ranks), read_evaluations(run / "metrics.jsonl", STEPS), run / "documents"))
    (alone, measured, documents), (shared, measured_too, documents_too) = found
    assert len(alone) == STEPS and [*measured] == [2, 4]
    assert largest_difference(alone, shared, "loss") <= bounds[0]
    assert largest_difference(alone, shared, "grad_norm") <= bounds[1]
    for step in measured:
        assert measured_too[step] == pytest.approx(measured[step], rel=10 * bounds[0])
    assert read_sums(documents_too, 3) == pytest.approx(read_sums(documents, 3), rel=1e-6)


@SLOW
def test_adapters_with_dropout_and_another_mesh_after_a_stop(tmp_path: Path) -> None:
    """LoRA in parts learns what it learns whole; and a run that stops goes on with any mesh, from the same numbers."""
    base = save_checkpoint(tmp_path / "base", "llama")
    make_config(tmp_path)
    model = {"path": str(base), "tokenizer": str(tmp_path / "tokenizer"), "init": "pretrained", "architecture": None}
    method = {"type": "lora", "rank": 4, "dropout": 0.1}

    def config(name: str, sequence: int) -> FinetuneConfig:
        return make_config(
            tmp_path, model=model, method=method, run={"name": name},
            train={"global_batch": 4, "micro_batch": 2, "max_steps": STEPS},
            parallel={"precision": "fp64", "mesh": {"sequence": sequence}},
        )  # fmt: skip

    alone = trajectory(config("alone", 1), 1)
    trajectory(config("moved", 2), 4, stop_after=1)
    trajectory(config("moved", 2), 2, stop_after=3)
    moved = trajectory(config("moved", 1), 1)
    assert len(moved) == STEPS
    assert largest_difference(alone, moved, "loss") <= LLAMA_FP64[0]
    assert largest_difference(alone, moved, "grad_norm") <= LLAMA_FP64[1]


def exchanged(values: Mapping[str, Any]) -> tuple[float, list[tuple[int, ...]]]:
    """The numbers that this rank receives for the attention of a step, and the shapes of the hidden states and losses
    that it has."""
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.step.train_step import train_step
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    parts = assemble(config, prepared, standing, torch.device("cpu"))
    shapes: list[tuple[int, ...]] = []
    for module in parts.model.modules():
        if type(module).__name__.endswith(("MLP", "Attention", "DecoderLayer", "LossHead")):
            module.register_forward_hook(lambda _, __, output: shapes.append(tuple(_first(output).shape)))
    with Collectives() as seen:
        train_step(
            parts.model, parts.optimizer, parts.scale, next(parts.batches),
            plan=standing.plan, parallel=parts.parallel, optim=config.optim, lr_factor=1.0, seed=3,
        )  # fmt: skip
    return seen.numbers["exchanged"], shapes


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(("sequence", "recompute", "times"), [(2, "none", 2), (4, "full", 3)])
def test_what_is_exchanged_is_what_the_formula_says(tmp_path: Path, sequence: int, recompute: str, times: int) -> None:
    """And nobody has the hidden states of a whole block outside of attention."""
    config = make_config(
        tmp_path, LLAMA, train={"global_batch": 2, "micro_batch": 2, "max_steps": 3},
        parallel={"precision": "fp32", "mesh": {"sequence": sequence}, "activation_checkpointing": recompute},
    )  # fmt: skip
    layer = exchanged_by_attention(tokens=96, heads=4, key_heads=2, width=8, members=sequence)
    for numbers, shapes in resident_ranks(exchanged, sequence, config.model_dump()):
        assert numbers == layer * LLAMA["num_hidden_layers"] * times
        assert {shape[1] for shape in shapes if shape[-1] > 1} == {96 // sequence}


def _two_networks() -> list[float]:
    """On four ranks: how far a network over pairs of ranks, and then one over all four, are off from the whole one,
    and the first one again afterwards."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "num_key_value_heads": 4}))
    set_attention(network.eval(), KernelChoice(name="documents_cpu", why="a test"))
    cpu, found = torch.device("cpu"), []
    batch = documents(network, cpu)
    with torch.no_grad():
        whole = logits_of(network, batch.input_ids, batch.position_ids, batch.borders).flatten(0, 1)
        pairs = make_device_mesh("cpu", {"data": 2, "sequence": 2}).get_group("sequence")
        networks = [(copy.deepcopy(network), pairs), (copy.deepcopy(network), dist.group.WORLD)]
        for each, group in networks:
            split_tokens(each, group)
        for each, group in (*networks, networks[0]):
            found.append(error_of_parts(each, group, whole, cpu))
    return found


def test_two_networks_of_other_groups_compute_in_one_process() -> None:
    """As a reference and a model do: nothing that all networks share keeps a group."""
    for found in resident_ranks(_two_networks, 4):
        assert max(found) < 1e-5, found
