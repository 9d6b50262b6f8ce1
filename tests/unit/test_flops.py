"""The operation count against hand counts, and the founding document's 45.5 % as what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raytune_fsdp.config import ModelConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.estimate.flops import Architecture, mfu, peak_flops, training_flops
from raytune_fsdp.model.network import build_base, count_architecture, load_architecture
from raytune_fsdp.parallel import check_precision
from tests.models import ARCHITECTURES, TIED, architecture


def count(values: dict[str, Any]) -> tuple[Architecture, int]:
    """The architecture as the operation count sees it, and all its weights."""
    config = ModelConfig(init="random", architecture=values)
    skeleton = build_base(load_architecture(config, None), config, "fp32")
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    return count_architecture(skeleton), sum(p.numel() for p in skeleton.parameters())


def test_the_founding_recipe_is_at_2_84_percent_of_its_devices() -> None:
    """70B weights, 500 steps of 16 samples of 2048 tokens in 13.5 hours on 16 A100: 45.4 % only of one's peak."""
    weights = Architecture(matmul_weights=70_000_000_000, layers=80, query_width=8192)
    flops = training_flops(weights, tokens=2048 * 16 * 500, attended_pairs=0)
    peak = peak_flops("NVIDIA A100-SXM4-80GB")
    assert peak == 312e12
    assert 100 * mfu(flops, seconds=48_600, devices=16, peak_flops=peak) == pytest.approx(2.84, abs=0.005)
    assert 100 * mfu(flops, seconds=48_600, devices=1, peak_flops=peak) == pytest.approx(45.4, abs=0.05)
    # The document rounds tokens and operations on the way: 1.64e7 tokens, 1.42e14 a second.
    assert 100 * 1.42e14 / peak == pytest.approx(45.51, abs=0.005)


def test_a_llama_with_grouped_heads_is_counted_by_hand() -> None:
    found, total = count(architecture("llama"))
    queries, keys_values, outputs = 32 * 32, 2 * 32 * 16, 32 * 32  # 4 heads of 8, 2 of them for keys and values
    feed_forward = 3 * 32 * 64
    embedding = 131 * 32
    assert found.matmul_weights == 2 * (queries + keys_values + outputs + feed_forward) + embedding
    assert (found.layers, found.query_width) == (2, 32)
    norms = (2 * 2 + 1) * 32
    assert total == found.matmul_weights + embedding + norms


def test_of_experts_only_the_chosen_count() -> None:
    found, _ = count(architecture("mixtral"))
    attention, router, expert = 2 * 32 * 32 + 2 * 32 * 16, 5 * 32, 3 * 32 * 64
    assert found.matmul_weights == 2 * (attention + router + 2 * expert) + 131 * 32  # 2 of 5 experts


def test_heads_that_differ_by_layer_count_each_with_its_width() -> None:
    found, _ = count(architecture("gemma4_text"))
    assert (found.layers, found.query_width) == (4, (4 * 8 + 4 * 16) / 2)  # two layers of either kind


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_embeddings_count_once_on_the_way_out(name: str) -> None:
    """A tied embedding is one tensor and one product, an untied one two tensors and one product."""
    found, total = count(architecture(name))
    config = ModelConfig(init="random", architecture=architecture(name))
    skeleton = build_base(load_architecture(config, None), config, "fp32")
    thin = sum(p.numel() for p in skeleton.parameters() if p.ndim < 2)
    lookups = 128 * 32 if name == "gpt2" else 0  # learned positions
    assert found.matmul_weights == total - thin - lookups - (0 if name in TIED else 131 * 32)


def test_llama_3_8b_has_7_5_billion_weights_to_multiply_with() -> None:
    found, total = count(
        {
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    assert total == 8_030_261_248
    assert found.matmul_weights == total - 128_256 * 4096 - 65 * 4096
    assert found.matmul_weights == pytest.approx(7.5e9, rel=0.01)
    assert (found.layers, found.query_width) == (32, 4096)


def test_the_count_is_what_the_products_of_a_real_pass_take() -> None:
    """torch counts the operations it runs; causal attention computes half the square of which we count the pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    from tests.models import build

    model = build("llama", attn_implementation="eager").train()
    tokens = torch.arange(2 * 24).view(2, 24) % 131
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    square = training_flops(count(architecture("llama"))[0], tokens=2 * 24, attended_pairs=2 * 24 * 24)
    # The Llama of transformers 5.17 computes its rotary angles as a product: 4 frequencies by 24 positions.
    angles = 2 * 4 * 24
    # A linear layer's input needs no gradient where it is the embedding of tokens: nothing else is left out.
    assert counter.get_total_flops() in (square, square + angles)


def test_attention_counts_pairs_and_weights_count_tokens() -> None:
    found = Architecture(matmul_weights=10, layers=3, query_width=4)
    assert training_flops(found, tokens=7, attended_pairs=0) == 6 * 10 * 7
    assert training_flops(found, tokens=0, attended_pairs=5) == 12 * 3 * 4 * 5
    assert mfu(100.0, seconds=2.0, devices=5, peak_flops=20.0) == 0.5


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_peaks_are_found_by_the_device_s_name(name: str, tera: float) -> None:
    assert peak_flops(name) == tera * 1e12


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops("cpu") is None and peak_flops("NVIDIA GeForce GTX 1080") is None


def test_bf16_on_a_device_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    gpu = torch.device("cuda")
    for has in (True, False):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has or including_emulation
        )
        for precision in ("fp32", "fp16", "fp64"):
            check_precision(precision, gpu)
        check_precision("bf16", torch.device("cpu"))
        for precision in ("bf16", "bf16_pure"):
            if has:
                check_precision(precision, gpu)
                continue
            with pytest.raises(ConfigError, match=f"{precision}: Tesla T4 has no bf16 .*fp16 or fp32"):
                check_precision(precision, gpu)
