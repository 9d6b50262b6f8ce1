"""Settings of torch that a run needs hold for the run and no longer."""

from __future__ import annotations

import pytest
import torch

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.parallel import numerics

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
