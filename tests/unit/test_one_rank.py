"""What one rank alone does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from raytune_fsdp.launch.worker import alone
from raytune_fsdp.model.objective.loss import micro_batch_loss
from tests.runs import LLAMA, make_config
from tests.unit.test_compiled_layers import CPU, DOCUMENTS, built, micro_batch


class Divided(TorchDispatchMode):
    """Counts the numbers that are divided into a new tensor, scalars left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.div.Tensor and found.ndim:
            self.numbers += found.numel()
        return found


def gradients(directory: Path, parallel: dict[str, Any], *, named: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of two micro-batches, and how many numbers backward divided. `named`: the factor 1 is."""
    with alone(CPU):
        model = built(make_config(directory, LLAMA, parallel={"compile": False, **parallel})).model.train()
        if named:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        divided = Divided()
        for lengths in DOCUMENTS[:2]:
            loss = micro_batch_loss(model, micro_batch(lengths)).total
            with divided:
                loss.backward()  # type: ignore[no-untyped-call]
        found = {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    return found, divided.numbers


@pytest.mark.parametrize("parallel", [{"precision": "bf16"}, {"precision": "fp32", "cpu_offload": True}])
def test_gradients_are_not_copied_to_be_divided_by_one(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Which FSDP does where the factor is set, and changes no bit of them."""
    ours, copied = gradients(tmp_path, parallel, named=False)
    theirs, divided = gradients(tmp_path, parallel, named=True)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(gradient.any() for gradient in ours.values())
    numbers = sum(gradient.numel() for gradient in ours.values())
    assert (copied, divided) == (0, 2 * numbers)
