"""The products of experts are tried on the device before a run relies on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.compile_layers import COMPILED
from raytune_fsdp.model.objective.routers import GROUPED, ONE_BY_ONE
from raytune_fsdp.run.described import bits_digest
from raytune_fsdp.run.trials.experts import choose_experts, why_experts_fail
from tests.runs import make_config

CPU = torch.device("cpu")


def network(kind: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8,
    }  # fmt: skip
    many = {"num_local_experts" if kind in ("mixtral", "gpt_oss") else "num_experts": 20}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **many), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_grouped_products_are_those_of_each_expert(kind: str, dtype: torch.dtype) -> None:
    """Biases and transposed weights (gpt-oss) included; the network itself stays on the meta device."""
    model = network(kind, dtype)
    assert why_experts_fail(model, CPU, dtype) is None
    assert (
        all(parameter.is_meta for parameter in model.parameters()) and model.config._experts_implementation == GROUPED
    )


def test_products_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel that gives an expert its neighbour's last token."""
    from transformers.integrations import moe

    right = moe._grouped_mm

    def wrong(states: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return right(states, weight, offs=(offs - (offs < states.shape[0]).int()).clamp(min=0))

    monkeypatch.setattr(moe, "_grouped_mm", wrong)
    failure = why_experts_fail(network(), CPU, torch.bfloat16)
    assert failure is not None and "from that of one expert after the other" in failure

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(moe, "_grouped_mm", broken)
    assert "no kernel image is available" in str(why_experts_fail(network(), CPU, torch.bfloat16))


def test_a_run_has_the_products_that_it_began_with() -> None:
    asked: list[int] = []

    def fails(reason: str | None) -> Any:
        return lambda: asked.append(1) or reason

    model = network()
    assert choose_experts(model, kept=None, fails=fails(None)) == KernelChoice(name=GROUPED, why="one product for all")
    assert choose_experts(model, kept=GROUPED, fails=fails(None)) == KernelChoice(name=GROUPED, why="as the run began")
    assert len(asked) == 2 and model.config._experts_implementation == GROUPED
    assert choose_experts(model, kept=None, fails=fails("it is wrong")) == KernelChoice(
        name=ONE_BY_ONE, why="grouped_mm: it is wrong"
    )
    assert model.config._experts_implementation == ONE_BY_ONE
    later = choose_experts(network(), kept=ONE_BY_ONE, fails=fails(None))
    assert later == KernelChoice(name=ONE_BY_ONE, why="as the run began") and len(asked) == 3
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with torch.device("meta"):
        dense = LlamaForCausalLM(LlamaConfig(**sizes))
    assert choose_experts(dense, kept=None, fails=fails("nobody asks")) is None and len(asked) == 3


def test_the_bits_of_older_runs_are_not_said_to_differ(tmp_path: Path) -> None:
    config, blocks = make_config(tmp_path), KernelChoice(name=COMPILED, why="")

    def digest(**more: KernelChoice) -> str:
        return bits_digest(config, {}, {"blocks": blocks, **more})

    assert digest(experts=KernelChoice(name=GROUPED, why="")) == digest()
    assert digest(experts=KernelChoice(name=ONE_BY_ONE, why="")) != digest()
