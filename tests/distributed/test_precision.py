"""16-bit compute over 32-bit weights, the loss scale of fp16, and updates that are not finite: skipped on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.contents import tensors_of
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_events, read_metrics, read_trajectory
from raytune_fsdp.step.train_step import SCALE_GROWTH_STEPS, LossScale
from tests.checkpoints import checkpoints, tensors_in, types_in
from tests.ranks import resident_ranks
from tests.runs import LLAMA, make_config, trajectory

CPU = torch.device("cpu")
SHORT = {"global_batch": 6, "micro_batch": 2, "max_steps": 12}


def run_dir(config: FinetuneConfig) -> Path:
    return Path(config.run.storage) / config.run.name


def assembled(values: Mapping[str, Any]) -> Any:
    """A run's parts on this rank. The optimizer has its state from the start, so that it can be looked at."""
    from raytune_fsdp.run.assemble import assemble
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    parts = assemble(config, *prepare_on_rank0(config), CPU)
    parts.optimizer.init_state()
    return parts


def train_watched(parts: Any, at_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """Train; return the steps that left weights and moments as they were, the loss scales, and the error if one came.

    `at_step` is called in front of every step. The last step is not among those looked at.
    """
    from raytune_fsdp.run.loop import train

    kept: list[int] = []
    scales: list[float] = []
    before: list[torch.Tensor] = []

    def look() -> None:
        now = [local(t).clone() for t in tensors_of(parts.model, parts.optimizer).values()]
        if before and all(torch.equal(a, b) for a, b in zip(before, now, strict=True)):
            kept.append(len(scales))
        before[:] = now
        scales.append(parts.scale.value.item())
        at_step(len(scales))

    error = None
    try:
        train(parts, look)
    except RaytuneError as raised:
        error = (type(raised).__name__, raised.exit_code, str(raised))
    parts.tracker.finish("failed" if error else "finished")
    return {"kept": kept, "scales": scales, "error": error}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def skipped_steps(config: FinetuneConfig) -> list[int]:
    """Steps whose update was skipped: the metrics and the events must say the same."""
    lines = [line for line in read_metrics(run_dir(config) / "metrics.jsonl") if line["kind"] == "step"]
    steps = [line["trajectory"]["step"] for line in lines if line["skipped"]]
    events = read_events(run_dir(config) / "events.jsonl")
    assert [e["fields"]["step"] for e in events if e["event"] == "skipped_update"] == steps
    return steps


def assert_finite(checkpoint: CommittedCheckpoint) -> None:
    tensors = tensors_in(checkpoint)
    assert tensors
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


# ---- fp16 ----


def test_loss_scale_halves_after_a_bad_step_and_doubles_after_many_good_ones() -> None:
    good, bad = torch.tensor(True), torch.tensor(False)
    scale = LossScale.start(enabled=True, device=CPU, value=1024.0)
    scale.update(bad)
    assert (scale.value.item(), scale.good_steps.item()) == (512.0, 0)
    for _ in range(SCALE_GROWTH_STEPS - 1):
        scale.update(good)
    assert (scale.value.item(), scale.good_steps.item()) == (512.0, SCALE_GROWTH_STEPS - 1)
    scale.update(good)
    assert (scale.value.item(), scale.good_steps.item()) == (1024.0, 0)
    scale.update(good)
    scale.update(bad)
    assert (scale.value.item(), scale.good_steps.item()) == (512.0, 0)


def test_other_precisions_are_never_scaled() -> None:
    scale = LossScale.start(enabled=False, device=CPU, value=1024.0)
    for finite in (True, False):
        scale.update(torch.tensor(finite))
    assert scale.value.item() == 1.0


def train_with_scale(values: Mapping[str, Any], scale: float) -> dict[str, Any]:
    parts = assembled(values)
    return train_watched(replace(parts, scale=LossScale.start(enabled=True, device=CPU, value=scale)))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fp16_recovers_from_an_overflow(tmp_path: Path, world: int) -> None:
    config = make_config(tmp_path, LLAMA, parallel={"precision": "fp16"}, train=SHORT)
    first = 2.0**26
    results = resident_ranks(train_with_scale, world, config.model_dump(), first)
    bad = skipped_steps(config)
    assert bad[:2] == [1, 2], "the scale is far too large for the first steps"
    assert bad[-1] <= 8, "and has found its size soon"
    for result in results:
        assert result["error"] is None
        assert result["kept"] == bad
        assert result["scales"] == [first / 2 ** sum(b < step for b in bad) for step in range(1, 13)]
    losses = [row["loss"] for row in read_trajectory(run_dir(config) / "metrics.jsonl")]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    state = read_state(checkpoints(run_dir(config))[-1])
    assert state.loss_scale == first / 2 ** len(bad)
    assert state.good_steps == 12 - bad[-1]


class Momentum:
    """An optimizer whose kernel knows no `found_inf`: it decides on the device, number by number."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        self._named = dict(model.named_parameters())
        self._lr = lr
        self._momenta: dict[str, torch.Tensor] = {}

    def init_state(self) -> None:
        self._momenta = {name: torch.zeros_like(parameter) for name, parameter in self._named.items()}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {f"{name}.momentum": tensor for name, tensor in self._momenta.items()}

    @torch.no_grad()
    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        for name, parameter in self._named.items():
            weight, momentum, gradient = local(parameter), local(self._momenta[name]), local(parameter.grad)
            momentum.copy_(torch.where(found_inf > 0, momentum, 0.9 * momentum + gradient))
            weight.copy_(torch.where(found_inf > 0, weight, weight - self._lr * lr_factor * momentum))
            parameter.grad = None


def train_by_momentum(values: Mapping[str, Any], scale: float) -> dict[str, Any]:
    parts = assembled(values)
    optimizer = Momentum(parts.model, lr=0.05)
    optimizer.init_state()
    return train_watched(
        replace(parts, optimizer=optimizer, scale=LossScale.start(enabled=True, device=CPU, value=scale))
    )


@pytest.mark.slow
def test_any_optimizer_skips_what_is_not_finite(tmp_path: Path) -> None:
    config = make_config(tmp_path, LLAMA, parallel={"precision": "fp16"}, train={**SHORT, "max_steps": 12})
    results = resident_ranks(train_by_momentum, 2, config.model_dump(), 2.0**26)
    bad = skipped_steps(config)
    assert bad[:2] == [1, 2] and len(bad) < 11
    assert all(result["error"] is None and result["kept"] == bad for result in results)


@pytest.mark.slow
def test_fp16_is_near_fp32(tmp_path: Path) -> None:
    curves = {
        precision: trajectory(
            make_config(tmp_path, LLAMA, run={"name": precision}, parallel={"precision": precision}, train=SHORT), 2
        )
        for precision in ("fp16", "bf16", "fp32")
    }
    for precision, bound in (("fp16", 2e-3), ("bf16", 2e-2)):
        for row, exact in zip(curves[precision], curves["fp32"], strict=True):
            assert row["samples"] == exact["samples"]
            assert row["loss"] == pytest.approx(exact["loss"], rel=bound)
            assert row["grad_norm"] == pytest.approx(exact["grad_norm"], rel=10 * bound)


# ---- types ----


def dtypes(values: Mapping[str, Any]) -> dict[str, set[torch.dtype]]:
    """Types of what a layer computes with, and of what the optimizer works on, after a step."""
    parts = assembled(values)
    computed: set[torch.dtype] = set()

    def look(module: torch.nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        computed.update((inputs[0].dtype, module.weight.dtype, output.dtype))

    parts.model.model.layers[0].mlp.up_proj.register_forward_hook(look)
    grads: set[torch.dtype] = set()
    for parameter in parts.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: grads.add(p.grad.dtype))
    train_watched(parts)
    return {
        "computed": computed,
        "gradients": grads,
        "weights": {p.dtype for p in parts.model.parameters()},
        "moments": {t.dtype for name, t in parts.optimizer.state_tensors().items() if not name.endswith(".step")},
    }


@pytest.mark.parametrize(
    ("precision", "compute", "master", "world"),
    [
        ("bf16", torch.bfloat16, torch.float32, 1),  # where FSDP shards nothing, but computes in other types
        ("fp32", torch.float32, torch.float32, 1),  # without FSDP
        ("bf16", torch.bfloat16, torch.float32, 2),
        ("bf16_pure", torch.bfloat16, torch.bfloat16, 2),
        pytest.param("fp16", torch.float16, torch.float32, 1, marks=pytest.mark.slow),
        pytest.param("fp16", torch.float16, torch.float32, 2, marks=pytest.mark.slow),
        pytest.param("bf16_pure", torch.bfloat16, torch.bfloat16, 1, marks=pytest.mark.slow),
        pytest.param("fp32", torch.float32, torch.float32, 2, marks=pytest.mark.slow),
    ],
)
def test_types(tmp_path: Path, world: int, precision: str, compute: torch.dtype, master: torch.dtype) -> None:
    config = make_config(tmp_path, LLAMA, parallel={"precision": precision}, train={**SHORT, "max_steps": 2})
    for found in resident_ranks(dtypes, world, config.model_dump()):
        assert found["computed"] == {compute}
        assert found["weights"] == found["moments"] == found["gradients"] == {master}
    assert set(types_in(checkpoints(run_dir(config))[-1], "model.").values()) == {master}


# ---- updates that are not finite ----


def train_poisoned(values: Mapping[str, Any], bad: set[int]) -> dict[str, Any]:
    """The last rank puts a NaN into one element of its gradient, after it was reduced, in every step of `bad`."""
    parts = assembled(values)
    now = [0]

    def poison(parameter: torch.nn.Parameter) -> None:
        if now[0] in bad and dist.get_rank() == dist.get_world_size() - 1:
            assert parameter.grad is not None
            local(parameter.grad).view(-1)[0] = math.nan

    next(p for p in parts.model.parameters() if p.ndim == 2).register_post_accumulate_grad_hook(poison)
    return train_watched(parts, lambda step: now.__setitem__(0, step))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_one_ranks_nan_skips_the_update_on_all(tmp_path: Path, world: int) -> None:
    config = make_config(tmp_path, LLAMA, parallel={"precision": "fp32"}, train=SHORT)
    results = resident_ranks(train_poisoned, world, config.model_dump(), {4, 7, 8})
    for result in results:
        assert result["error"] is None
        assert result["kept"] == [4, 7, 8]
    assert skipped_steps(config) == [4, 7, 8]
    rows = read_trajectory(run_dir(config) / "metrics.jsonl")
    assert [row["step"] for row in rows if math.isnan(row["grad_norm"])] == [4, 7, 8]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert_finite(checkpoints(run_dir(config))[-1])


def test_too_many_skipped_in_a_row_stop_the_run(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        LLAMA,
        parallel={"precision": "bf16"},
        train=SHORT,
        optim={"max_skipped": 3},
        checkpoint={"every": 2, "keep_last": None, "asynchronous": False},
    )
    results = resident_ranks(train_poisoned, 2, config.model_dump(), {2, 3, *range(5, 13)})
    for result in results:
        kind, exit_code, message = result["error"]
        assert (kind, exit_code) == ("TrainingError", 1)
        assert "step 7" in message
        assert "optim.max_skipped=3" in message
        assert result["kept"] == [2, 3, 5, 6]
    assert skipped_steps(config) == [2, 3, 5, 6, 7], "two in a row at 2 and 3 are not three"
    saved = checkpoints(run_dir(config))
    assert [found.step for found in saved] == [2, 4, 6]
    assert read_state(saved[-1]).skipped_in_row == 2
    for found in saved:
        assert_finite(found)
    # Started again from step 6 it counts on, and stops at the next one.
    again = resident_ranks(train_poisoned, 2, config.model_dump(), {1})
    assert "step 7" in again[0]["error"][2]


def test_while_updates_are_skipped_nothing_is_pruned_and_what_is_advised_works(tmp_path: Path) -> None:
    """Whatever went wrong may be in the newest checkpoints; the run that is begun again needs one of before."""
    config = make_config(
        tmp_path, LLAMA, parallel={"precision": "fp32"}, train=SHORT, optim={"max_skipped": 4},
        checkpoint={"every": 1, "keep_last": 2, "asynchronous": False},
    )  # fmt: skip
    results = resident_ranks(train_poisoned, 2, config.model_dump(), {2, 3, 6, 7, 8, 9})
    there = checkpoints(run_dir(config))
    # 1 to 3 were pruned after steps 4 and 5, whose updates were done.
    assert [found.step for found in there] == [4, 5, 6, 7, 8]
    for result in results:
        message = result["error"][2]
        assert "step 9" in message and "new run.name" in message and "model.path" in message
        assert f"step 5 or earlier in {there[0].root}" in message
    started = make_config(
        tmp_path, parallel={"precision": "fp32"}, train={**SHORT, "max_steps": 2}, optim={"lr": 1e-4},
        model={"init": "pretrained", "architecture": None, "path": there[1].path}, run={"name": "again"},
    )  # fmt: skip
    assert resident_ranks(train_poisoned, 2, started.model_dump(), set())[0]["error"] is None
    assert [found.step for found in checkpoints(run_dir(started))] == [2]


def train_with_broken_weight(values: Mapping[str, Any], step: int) -> dict[str, Any]:
    parts = assembled(values)

    def break_weight(now: int) -> None:
        if now == step and dist.get_rank() == 1:
            with torch.no_grad():
                local(next(parts.model.parameters())).view(-1)[0] = math.nan

    return train_watched(parts, break_weight)


def test_weights_that_are_not_finite_are_never_committed(tmp_path: Path) -> None:
    # Not beside training: a save that a slow disk holds up would postpone the next one to a step that is not asked for.
    saves = {"every": 2, "keep_last": None, "asynchronous": False}
    config = make_config(tmp_path, LLAMA, parallel={"precision": "fp32"}, train=SHORT, checkpoint=saves)
    results = resident_ranks(train_with_broken_weight, 2, config.model_dump(), 5)
    for result in results:
        kind, exit_code, message = result["error"]
        assert (kind, exit_code) == ("TrainingError", 1)
        assert "step 6" in message and "is not finite" in message and "was not saved" in message
    saved = checkpoints(run_dir(config))
    assert [found.step for found in saved] == [2, 4]
    for found in saved:
        assert_finite(found)
