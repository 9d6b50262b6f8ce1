"""The check of attention, packing and loss before the first step: what it refuses, with which words, on which ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ConfigError, ModelError, RaytuneError
from raytune_fsdp.model.attention.calls import Call, reference
from raytune_fsdp.model.attention.choose import KernelNeeds, generating, without_borders
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.run.trials import computation
from raytune_fsdp.run.trials.computation import check_computation
from tests.models import architecture, build
from tests.ranks import run_ranks
from tests.runs import make_config

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computation, "on_all_ranks", lambda work: [work()])


def nan_in_the_first_call() -> Callable[..., torch.Tensor]:
    calls: list[Call] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        calls.append(call)
        return reference(q, k, v, call) * (math.nan if len(calls) == 2 else 1.0)

    return kernel


def test_a_kernel_that_returns_nan_is_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the first layer: Python's max() keeps a first NaN, and no later one."""
    monkeypatch.setitem(KERNELS, "documents_cpu", nan_in_the_first_call())
    model = build("llama")
    model.set_attn_implementation("documents_cpu")
    with pytest.raises(ModelError, match=r"documents_cpu is wrong here: its results are not finite in float32; set"):
        check_computation(model, "none", CPU, torch.float32)


@pytest.mark.parametrize(("packing", "chunked"), [("best_fit", False), ("none", True)])
def test_logits_that_are_not_finite_are_refused(alone: None, packing: str, chunked: bool) -> None:
    model = build("llama")
    if chunked:
        install_chunked_loss(model)
    check_computation(model, packing, CPU, torch.float32)
    model.lm_head.weight.data[7, 3] = math.nan
    with pytest.raises(ModelError, match=r"logits of LlamaForCausalLM are not finite in float32; choose another"):
        check_computation(model, packing, CPU, torch.float32)


def _refused(nan_on: int) -> str:
    """What this rank says when the kernel of another one returns NaN. In a process of its own."""
    import torch.distributed as dist

    if dist.get_rank() == nan_on:
        KERNELS["documents_cpu"] = nan_in_the_first_call()
    model = build("llama")
    model.set_attn_implementation("documents_cpu")
    try:
        check_computation(model, "none", CPU, torch.float32)
    except RaytuneError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("nan_on", [0, 1, 2])
def test_all_ranks_refuse_what_one_finds(nan_on: int) -> None:
    first, second = run_ranks(_refused, 2, nan_on)
    assert first == second
    assert (first == "accepted") == (nan_on == 2)


def _assembled(values: Mapping[str, Any]) -> str:
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.run.assemble import assemble
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    try:
        parts = assemble(config, *prepare_on_rank0(config), CPU)
    except RaytuneError as error:
        return str(error)
    return f"{parts.model.config._attn_implementation}, {next(parts.model.parameters()).dtype}"


def test_bf16_is_judged_as_bf16_also_without_a_kernel_of_ours(tmp_path: Path) -> None:
    """The weights of such a run are fp32; its logits are large, and bf16 keeps two digits of them."""
    capped = architecture("gemma2", initializer_range=0.5)
    config = make_config(tmp_path, capped, parallel={"precision": "bf16"})
    (found,) = run_ranks(_assembled, 1, config.model_dump())
    assert found == "eager, torch.float32"


@pytest.mark.parametrize(
    ("name", "dtype", "refused"),
    [("mixtral", torch.bfloat16, False), ("mixtral", torch.float32, True), ("llama", torch.bfloat16, True)],
)
def test_only_experts_in_16_bits_may_differ_a_little(
    alone: None, name: str, dtype: torch.dtype, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get batches of other sizes when other documents are beside them. The weights are fp32 in each case."""
    monkeypatch.setattr(computation, "leak_between_documents", lambda *_: 1e-3)
    if refused:
        with pytest.raises(ConfigError, match=r"packed documents see each other \(logits change by 1\.0e-03\)"):
            check_computation(build(name), "best_fit", CPU, dtype)
    else:
        check_computation(build(name), "best_fit", CPU, dtype)


def test_a_leak_in_bf16_is_still_found(alone: None) -> None:
    model = build("opt").to(torch.bfloat16)  # whose mask ignores where a document begins
    with pytest.raises(ConfigError, match=r"packed documents see each other"):
        check_computation(model, "best_fit", CPU, torch.bfloat16)


def test_text_is_generated_with_an_attention_that_is_right() -> None:
    model = build("llama")
    model.set_attn_implementation("documents_cpu")
    assert generating(model, KernelNeeds()) == "sdpa"
    assert generating(model, KernelNeeds(eager="sdpa computes something else for it")) == "eager"
    for name in ("eager", "sdpa"):
        with without_borders(model, name):
            assert model.config._attn_implementation == name
        assert model.config._attn_implementation == "documents_cpu"
    model.set_attn_implementation("sdpa")
    with without_borders(model, "eager"):
        assert model.config._attn_implementation == "sdpa", "what is transformers' own stays"
