"""Settings of torch that a run needs hold for the run and no longer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.launch import worker
from raytune_fsdp.launch.environment import settings_of_nccl
from raytune_fsdp.model.compile_layers import Compiler
from raytune_fsdp.step.precision import numerics
from tests.runs import make_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_what_the_config_says(allowed: bool) -> None:
    config = ParallelConfig(tf32=allowed)
    before = torch.backends.cuda.matmul.allow_tf32
    with numerics(config, CPU, deterministic=False):
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_deterministic_holds_in_the_run_alone() -> None:
    with numerics(ParallelConfig(), CPU, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("deterministic", "device", "known", "wanted"),
    [
        (True, "auto", {}, {"NCCL_ALGO": "^NVLS,NVLSTree", "FLASH_ATTENTION_DETERMINISTIC": "1"}),
        (True, "cuda", {"NCCL_ALGO": "Ring"}, {"FLASH_ATTENTION_DETERMINISTIC": "1"}),
        (True, "cuda", {"FLASH_ATTENTION_DETERMINISTIC": "0"}, {"NCCL_ALGO": "^NVLS,NVLSTree"}),
        (True, "cpu", {}, {}),
        (False, "cuda", {}, {}),
    ],
)
def test_what_libraries_must_be_told_before_ranks_join(
    tmp_path: Path, deterministic: bool, device: str, known: dict[str, str], wanted: dict[str, str]
) -> None:
    config = make_config(tmp_path, run={"deterministic": deterministic}, cluster={"device": device})
    assert settings_of_nccl(config, known) == wanted


def settings() -> dict[str, object]:
    return {
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "fail_on_recompile_limit_hit": torch._dynamo.config.fail_on_recompile_limit_hit,
        "force_non_lazy_backward_lowering": torch._functorch.config.force_non_lazy_backward_lowering,
        "fallback_random": torch._inductor.config.fallback_random,
        "inductor.deterministic": torch._inductor.config.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.mark.parametrize("own", [None, ":16:8"])
def test_a_run_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    """Whoever calls finetune() may compile and compute afterwards, and in a way of their own."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if own is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
    inside: list[dict[str, object]] = []

    def assemble(*_: object) -> None:
        Compiler()
        inside.append(settings())
        raise ModelError("as far as this")

    monkeypatch.setattr(worker, "assemble", assemble)
    limit = torch._dynamo.config.recompile_limit
    config = make_config(tmp_path, run={"deterministic": True})
    nothing: Any = None
    with (
        torch._dynamo.config.patch(recompile_limit=limit + 100, fail_on_recompile_limit_hit=False),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=False),
        torch._inductor.config.patch(fallback_random=False, deterministic=False),
    ):
        before = settings()
        with pytest.raises(ModelError, match="as far as this"):
            worker.work(config, nothing, nothing, CPU, lambda: None, own_log=True)
        assert settings() == before
    (there,) = inside
    kept = ["CUBLAS_WORKSPACE_CONFIG"] if own is not None else []
    assert [name for name in before if there[name] == before[name]] == kept
