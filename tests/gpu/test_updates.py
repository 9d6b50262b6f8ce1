"""On a GPU: an update as one kernel has the bits of its operations, wherever a weight is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.compile_layers import settings_restored
from raytune_fsdp.run.trials.update import why_update_differs
from tests.gpu.test_gpu import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KINDS: dict[str, dict[str, Any]] = {
    "8bit": {"optimizer": {"type": "adamw", "moments": "8bit"}},
    "bf16": {"optimizer": {"type": "adamw", "moments": "bf16"}},
    "sgd": {"optimizer": {"type": "sgd", "nesterov": True}},
    "lion": {"optimizer": {"type": "lion"}},
    "adafactor": {"optimizer": {"type": "adafactor"}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_has_the_bits_of_its_operations(kind: str, dtype: torch.dtype) -> None:
    values = {**KINDS[kind], "lr": 0.01, "weight_decay": 0.1, "stochastic_rounding": dtype == torch.bfloat16}
    with settings_restored():
        device = torch.device(DEVICE)
        assert why_update_differs(OptimConfig.model_validate(values), device, dtype, exact=True) is None
