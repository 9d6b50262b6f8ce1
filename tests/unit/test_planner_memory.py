"""What the planner says of memory: a few blocks stand for all, bytes that stay are those of the shapes."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from raytune_fsdp.base.batch import Cursor, PackedSample
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.memory import Memory, memory_of
from raytune_fsdp.predict.trace import live
from raytune_fsdp.predict.trace.layers import representatives
from raytune_fsdp.predict.trace.live import TookTooLong
from raytune_fsdp.predict.trace.trace import as_rank_of, full_batches, trace
from raytune_fsdp.run.trials.needs import network_needs

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 11, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
SHORT = {**LLAMA, "num_hidden_layers": 6}
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 26, "vocab_size": 512, "sliding_window": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 8, "num_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def config_of(architecture: dict[str, Any], **sections: Any) -> FinetuneConfig:
    values: dict[str, Any] = {
        "run": {"name": "planned"},
        "model": {"init": "random", "architecture": architecture, "tokenizer": "none"},
        "data": {"train": [{"path": "rows.jsonl"}], "seq_len": 128},
        "train": {"max_steps": 4, "global_batch": 16, "micro_batch": 2},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return FinetuneConfig.model_validate(values)


def planned(config: FinetuneConfig, world: int, **how: Any) -> Memory:
    hf_config = load_architecture(config.model, None)
    needs = network_needs(config, hf_config, build_network(hf_config, config))
    plan = resolve(config, world)
    return memory_of(trace(config, hf_config, needs, plan, memory=80 << 30, **how))


CONFIGS = {
    "full_shard": (SHORT, 4, {}),
    "selective": (LLAMA, 4, {"parallel": {"activation_checkpointing": "selective"}}),
    "recomputed": (LLAMA, 2, {"parallel": {"activation_checkpointing": "full"}}),
    "every_n": (LLAMA, 2, {"parallel": {"activation_checkpointing": "every_n", "recompute_every": 3}}),
    "wrap": (LLAMA, 4, {"parallel": {"wrap": 2}}),
    "grad_op": (LLAMA, 4, {"parallel": {"strategy": "shard_grad_op"}}),
    "replicate": (LLAMA, 2, {"parallel": {"strategy": "replicate", "precision": "fp32"}}),
    "hybrid": (LLAMA, 4, {"parallel": {"strategy": "hybrid_shard", "shard_size": 2}}),
    "deferred": (LLAMA, 4, {"parallel": {"defer_gradient_sync": True}}),
    "alone": (LLAMA, 1, {"parallel": {"precision": "fp32"}}),
    "lora": (LLAMA, 2, {"method": {"type": "lora"}}),
    "qlora": (SHORT, 2, {"method": {"type": "qlora"}}),
    "lora alone": (SHORT, 1, {"method": {"type": "lora"}}),
    "freeze": (LLAMA, 2, {"method": {"type": "freeze", "trained": ["layers.([7-9]|10)", "lm_head"]}}),
    "8bit": (LLAMA, 2, {"optim": {"optimizer": {"type": "adamw", "moments": "8bit"}}}),
    "muon": (LLAMA, 2, {"optim": {"optimizer": {"type": "muon"}}}),
    "pure": (LLAMA, 2, {"parallel": {"precision": "bf16_pure"}}),
    "windows": (GEMMA, 2, {}),
    "experts": (EXPERTS, 2, {}),
}


EACH = [name if name == "full_shard" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", EACH)
def test_a_few_blocks_say_what_all_of_them_need(name: str) -> None:
    architecture, world, sections = CONFIGS[name]
    config = config_of(architecture, **sections)
    few, all_ = planned(config, world), planned(config, world, whole=True)
    assert dict(few.start) == dict(all_.start)
    assert few.total == all_.total
    assert dict(few.peak) == dict(all_.peak)


def test_samples_alike_are_the_block_that_they_would_be_put_together_to() -> None:
    config = config_of(LLAMA, train={"micro_batch": 4})
    (block, _) = full_batches(config, load_architecture(config.model, None), 2).micro_batches
    names = ("input_ids", "labels", "position_ids", "source_ids")
    sample = PackedSample(**{name: getattr(block, name)[0].numpy().astype("int32") for name in names}, id=0)
    expected = to_batch([sample] * 4, index=0, after=Cursor())
    assert expected.input_ids.shape == (4, 128) and expected.target_tokens == 4 * 127
    torch.testing.assert_close(asdict(block), asdict(expected), rtol=0, atol=0)  # compares types, too


def test_what_stays_is_what_the_shapes_say() -> None:
    config = config_of(LLAMA, parallel={"strategy": "replicate"})
    numbers = sum(p.numel() for p in build_network(load_architecture(config.model, None), config).parameters())
    found = planned(config, 2)
    # The rotary frequencies, twice, and a counter of steps for every weight.
    assert 0 <= found.start["weights"] - 4 * numbers <= 2 * 4 * 8
    weights = 3 + 9 * 11
    assert found.start["optimizer"] == 8 * numbers + 4 * weights
    assert found.peak["gradients"] == 4 * numbers


@pytest.mark.slow
def test_one_rank_has_its_frozen_weights_once() -> None:
    """By the shapes: all that is gathered is a 16-bit copy of the adapters."""
    found = planned(config_of(LLAMA, method={"type": "lora"}), 1)
    hf_config = load_architecture(config_of(LLAMA).model, None)
    network = build_network(hf_config, config_of(LLAMA, method={"type": "lora"}))
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in network.parameters() if not p.requires_grad)
    assert 0 <= found.start["weights"] - 4 * trained - 2 * frozen <= 2 * 4 * 8
    # In backward, also gradients that are on their way.
    assert 2 * trained <= found.peak["gathered"] <= 2 * trained + 6 * trained


@pytest.mark.slow
def test_an_8b_with_adapters_fits_a_card_without_recomputation() -> None:
    from benchmarks.gpu.training import config_of as piece
    from raytune_fsdp.predict.devices import DEVICES
    from raytune_fsdp.predict.prediction import Cluster, predict
    from raytune_fsdp.predict.subject import ModelSpec

    config = piece(
        Path("nowhere"), size="8b", micro=2, seq_len=4096, steps=1, compiled=True,
        method={"type": "lora", "rank": 16, "alpha": 32},
    )  # fmt: skip
    found = predict(ModelSpec.of(config), config, 1, Cluster(device=DEVICES["H100"], per_node=1))
    assert found.needed <= 66 * 2**30


@pytest.mark.slow
def test_flash_attention_pads_each_document_in_backward() -> None:
    """By its source: 128 rows in fp32, of each head's width and a sum."""
    peaks = [planned(config_of(LLAMA), 2, documents=many).peak["activations"] for many in (4000, 8000)]
    assert peaks[1] - peaks[0] == 4000 * 2 * 128 * 4 * (32 + 1) * 4


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_that_share_samples_have_their_part_of_the_activations(recompute: str) -> None:
    """By accounting: a quarter, and what does not depend on how many tokens there are."""
    wide = {**LLAMA, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
    wide["num_hidden_layers"] = 2
    activations = {}
    for sequence in (1, 4):
        config = config_of(
            {**wide, "max_position_embeddings": 8192}, data={"seq_len": 8192},
            parallel={"mesh": {"sequence": sequence}, "activation_checkpointing": recompute},
            train={"micro_batch": 1, "global_batch": 4},
        )  # fmt: skip
        activations[sequence] = planned(config, 4).peak["activations"]
    assert 0.25 <= activations[4] / activations[1] <= 0.30


@pytest.mark.slow
def test_an_exact_run_needs_as_much_memory_in_bf16_and_a_unit_more_in_fp32() -> None:
    """A rank has what it sends and what it gets of a unit's gradients: in bf16 both are as large as one in fp32.

    A KiB more is for numbers such as those of the norm.
    """
    network = build_network(load_architecture(config_of(LLAMA).model, None), config_of(LLAMA))
    layer = sum(parameter.numel() for parameter in network.model.layers[0].parameters())
    rest = sum(parameter.numel() for parameter in network.parameters()) - 11 * layer
    for precision, more in (("bf16", 0), ("fp32", 4 * max(layer, rest))):
        rounded, exact = (
            planned(config_of(LLAMA, run={"exact": exact}, parallel={"precision": precision}), 4).total
            for exact in (False, True)
        )
        assert exact <= rounded + more + 1024, precision


def test_repetitions_are_taken_out_of_the_middle() -> None:
    assert representatives([0] * 4, 2) == [0, 1, 2, 3]
    assert representatives([0] * 9, 2) == [0, 1, 2, 2, 2, 2, 2, 7, 8]
    pattern = representatives([0, 0, 1] * 8, 2)
    assert all([0, 0, 1][i % 3] == [0, 0, 1][stands % 3] for i, stands in enumerate(pattern))
    assert len(set(pattern)) <= 11
    two = representatives([0] * 20 + [1] * 20, 2)
    assert all((i < 20) == (stands < 20) for i, stands in enumerate(two))
    assert len(set(two)) == 10
    assert representatives(list(range(7)), 2) == list(range(7))


@pytest.mark.slow
def test_a_network_that_also_sees_has_blocks_of_two_kinds() -> None:
    text = {**GEMMA, "num_hidden_layers": 9, "sliding_window_pattern": 3}
    sees = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 11, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    architecture = {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
        "vision_config": sees, "mm_tokens_per_image": 4,
    }  # fmt: skip
    config = config_of(architecture)
    few, all_blocks = planned(config, 2), planned(config, 2, whole=True)
    assert few == all_blocks
    hf_config = load_architecture(config.model, None)
    numbers = sum(parameter.numel() for parameter in build_network(hf_config, config).parameters())
    assert few.start["optimizer"] == pytest.approx(8 * numbers / 2, rel=0.01)


def test_a_trace_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first operation after it."""
    clock = itertools.count()
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(TookTooLong):
        planned(config_of(LLAMA), 2, whole=True, until=100)
    assert next(clock) == 102


def test_what_runs_in_this_process_after_a_prediction_has_its_own_groups() -> None:
    """Under torchrun rank 0 predicts, and is then a rank: what torch has kept of the mesh of the prediction would give
    its weights groups that are gone, and the first sum over them would fail, or wait for ever."""

    def group_of_a_result(before: int) -> tuple[str, str]:
        for _ in range(before):
            dist.new_group([0])  # so that groups have other names
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        made = torch.empty_like(DTensor.from_local(torch.zeros(2), mesh, [Shard(0), Shard(0)], run_check=False))
        return made.device_mesh.get_group("tensor").group_name, mesh.get_group("tensor").group_name

    for before in (0, 3):
        with as_rank_of(4):
            found, right = group_of_a_result(before)
            assert found == right
