"""What one rank alone does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from raytune_fsdp.base.errors import DamagedError, DataError, RowError, TrainingError, TransientError
from raytune_fsdp.base.lease import TakenOverError
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.run.measure.own_failure import is_of_training, put_failure
from raytune_fsdp.step import parallel
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


def gradients(directory: Path, settings: dict[str, Any], *, named: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of two micro-batches, and how many numbers backward divided. `named`: the factor 1 is."""
    with alone(CPU):
        model = built(make_config(directory, LLAMA, parallel={"compile": False, **settings})).model.train()
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


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "fp32", "cpu_offload": True}])
def test_gradients_are_not_copied_to_be_divided_by_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Which FSDP does where the factor is set, and changes no bit of them."""
    ours, copied = gradients(tmp_path, settings, named=False)
    theirs, divided = gradients(tmp_path, settings, named=True)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(gradient.any() for gradient in ours.values())
    numbers = sum(gradient.numel() for gradient in ours.values())
    assert (copied, divided) == (0, 2 * numbers)


LORA = {"type": "lora", "rank": 4, "alpha": 8}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": {**LORA, "dora": True},
    "qlora": {**LORA, "type": "qlora"},
    "freeze": {"type": "freeze", "trained": ["model.layers.1"]},
}


def frozen_and_trained(directory: Path, method: dict[str, Any]) -> tuple[set[str], dict[str, torch.Tensor]]:
    """The frozen weights that FSDP has, and losses and gradients of two micro-batches, in bf16."""
    config = make_config(directory, LLAMA, parallel={"precision": "bf16", "compile": False}, method=method)
    with alone(CPU):
        model = built(config).model.train()
        found = {}
        for number, lengths in enumerate(DOCUMENTS[:2]):
            found[f"loss {number}"] = loss = micro_batch_loss(model, micro_batch(lengths)).total
            loss.backward()  # type: ignore[no-untyped-call]
        named = dict(model.named_parameters())
        found |= {name: local_piece(p.grad) for name, p in named.items() if p.grad is not None}
    return {name for name, p in named.items() if isinstance(p, DTensor) and not p.requires_grad}, found


@pytest.mark.parametrize(
    "method", ["dora", "freeze", *(pytest.param(each, marks=pytest.mark.slow) for each in ("lora", "qlora"))]
)
def test_frozen_weights_are_not_copied_to_be_gathered_from_one(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    wrapped, ours = frozen_and_trained(tmp_path, METHODS[method])
    assert not wrapped and any(value.any() for name, value in ours.items() if not name.startswith("loss"))
    monkeypatch.setattr(parallel, "left_alone", lambda *_: set())
    before, theirs = frozen_and_trained(tmp_path, METHODS[method])
    assert len(before) > 8 and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# What one rank says of its own training.


def test_a_run_that_diverges_says_on_record_that_training_itself_has_failed(tmp_path: Path) -> None:
    """Without what differs from one try to the next, which a driver adds."""
    config = make_config(tmp_path, optim={"lr": 1e30, "max_skipped": 1, "warmup_ratio": 0.0, "max_grad_norm": None})
    with pytest.raises(TrainingError, match="has not been finite"):
        finetune(config)
    place = RunDir.of(config)
    (said,) = [each for each in read_events(place.events) if each["event"] == names.TRAINING_FAILED]
    assert said["attempt"] == 1 and said["fields"]["rank"] == 0 and "has not been finite" in said["fields"]["cause"]
    with alone(CPU):  # as the other ranks do
        put_failure(TrainingError("it has diverged"), place, 1, None)
    assert len([each for each in read_events(place.events) if each["event"] == names.TRAINING_FAILED]) == 1


def test_what_fails_around_training_is_none_of_its_own_failures() -> None:
    def raised(error: TrainingError, cause: BaseException | None = None) -> TrainingError:
        error.__cause__ = cause
        return error

    own = [raised(TrainingError("x"), cause) for cause in (None, torch.OutOfMemoryError(), RowError("x", "y"))]
    others = [raised(TrainingError("x"), cause) for cause in (DamagedError("x"), DataError("x"), OSError("x"))]
    others += [TransientError("x"), TakenOverError("x")]
    assert all(map(is_of_training, own)) and not any(map(is_of_training, others))
