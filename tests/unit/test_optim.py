"""The learning rate as a function of the step, and which weights decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    get_constant_schedule,
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)

from raytune_fsdp.config import LoraMethod, OptimConfig
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.groups import groups_of, rates_of_states, undecayed_names
from raytune_fsdp.step.optim.schedule import lr_factor, multiplier
from tests.models import build
from tests.unit.test_plan import config


def values(schedule: dict[str, Any], *, steps: int, warmup: int, until: int | None = None) -> list[float]:
    optim = OptimConfig.model_validate({"schedule": schedule})
    return [multiplier(s, optim, schedule_steps=steps, warmup_steps=warmup) for s in range(1, (until or steps) + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"type": "constant"}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ({"type": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ({"type": "linear", "floor": 0.2}, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"type": "cosine"}, [0.5, 1, 1, 0.8535533905932737, 0.5, 0.1464466094067262, 0, 0]),
        ({"type": "cosine", "floor": 0.5}, [0.5, 1, 1, 0.9267766952966369, 0.75, 0.5732233047033631, 0.5, 0.5]),
        ({"type": "polynomial"}, [0.5, 1, 1, 0.5625, 0.25, 0.0625, 0, 0]),
        ({"type": "polynomial", "power": 1, "floor": 0.2}, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"type": "inverse_sqrt"}, [0.5, 1, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5, (1 / 3) ** 0.5, (2 / 7) ** 0.5]),
        ({"type": "wsd", "decay": 0.5}, [0.5, 1, 1, 1, 2 / 3, 1 / 3, 0, 0]),
        ({"type": "wsd", "decay": 0.5, "floor": 0.4}, [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.4]),
    ],
)
def test_golden_values(schedule: dict[str, Any], expected: list[float]) -> None:
    """Six steps, two of them warmup, and two beyond the end."""
    assert values(schedule, steps=6, warmup=2, until=8) == pytest.approx(expected, abs=1e-15)


schedules = st.one_of(
    st.just({"type": "constant"}),
    st.builds(lambda t, f: {"type": t, "floor": f}, st.sampled_from(["linear", "cosine"]), st.floats(0, 1)),
    st.builds(lambda d, f: {"type": "wsd", "decay": d, "floor": f}, st.floats(0.01, 1), st.floats(0, 1)),
)


@given(schedule=schedules, steps=st.integers(1, 300), warmup=st.integers(0, 300))
def test_it_rises_to_the_peak_and_falls_to_the_floor(schedule: dict[str, Any], steps: int, warmup: int) -> None:
    assume(warmup < steps)
    found = values(schedule, steps=steps, warmup=warmup, until=2 * steps + 2)
    floor = schedule.get("floor", 1.0)
    assert all(0 < value <= 1 for value in found[:warmup]) and all(floor - 1e-12 <= v <= 1 for v in found[warmup:])
    assert found[:warmup] == sorted(found[:warmup]) and found[warmup:] == sorted(found[warmup:], reverse=True)
    if warmup:
        assert found[warmup - 1] == 1
    assert found[steps:] == pytest.approx([floor] * (steps + 2), abs=1e-12)


@given(steps=st.integers(1, 300))
def test_the_first_step_after_warmup_has_the_peak(steps: int) -> None:
    for kind in ("constant", "linear", "cosine"):
        assert values({"type": kind}, steps=steps, warmup=0)[0] == 1


@settings(deadline=None)  # the first call imports
@given(steps=st.integers(2, 200), warmup=st.integers(0, 50))
def test_it_is_transformers_schedule_after_the_warmup(steps: int, warmup: int) -> None:
    """Theirs starts from 0 and ours from a first step that learns something; from the peak on they are the same."""
    assume(warmup < steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = {
        "cosine": get_cosine_schedule_with_warmup(optimizer, 0, steps - warmup),
        "linear": get_linear_schedule_with_warmup(optimizer, 0, steps - warmup),
        "constant": get_constant_schedule(optimizer),
    }
    for kind, scheduler in theirs.items():
        (shape,) = scheduler.lr_lambdas
        ours = values({"type": kind}, steps=steps, warmup=warmup)[warmup:]
        assert ours == pytest.approx([shape(i) for i in range(steps - warmup)], abs=1e-12)


@settings(deadline=None)
@given(steps=st.integers(5, 200), warmup=st.integers(1, 50), power=st.sampled_from([0.5, 2.0, 3.0]))
def test_it_is_transformers_polynomial_and_inverse_root_after_the_warmup(steps: int, warmup: int, power: float) -> None:
    assume(warmup < steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    (theirs,) = get_polynomial_decay_schedule_with_warmup(
        optimizer, 0, steps - warmup, lr_end=0.1, power=power
    ).lr_lambdas
    ours = values({"type": "polynomial", "power": power, "floor": 0.1}, steps=steps, warmup=warmup)[warmup:]
    assert ours == pytest.approx([theirs(i) for i in range(steps - warmup)], abs=1e-12)
    for timescale in (None, 40):
        (theirs,) = get_inverse_sqrt_schedule(optimizer, warmup, timescale).lr_lambdas
        ours = values({"type": "inverse_sqrt", "timescale": timescale}, steps=steps, warmup=warmup)[warmup:]
        assert ours == pytest.approx([theirs(warmup + i) for i in range(steps - warmup)], abs=1e-12)


@settings(deadline=None)
@given(steps=st.integers(8, 200), rise=st.sampled_from([0.25, 0.3, 0.5]))
def test_one_cycle_is_torch_s(steps: int, rise: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, steps, pct_start=rise, cycle_momentum=False)
    found = []
    for _ in range(steps):
        found.append(theirs.get_last_lr()[0])
        optimizer.step()
        if len(found) < steps:
            theirs.step()
    ours = values({"type": "one_cycle", "rise": rise}, steps=steps, warmup=0, until=steps + 3)
    assert ours[:steps] == pytest.approx(found, abs=1e-9)
    assert ours[steps:] == pytest.approx([4e-6] * 3, abs=1e-12), "a run that goes on stays at the floor"


def test_one_cycle_rises_by_itself() -> None:
    with pytest.raises(ValueError, match=r"optim.warmup_steps=5: the schedule one_cycle has a rise of its own"):
        OptimConfig.model_validate({"schedule": {"type": "one_cycle"}, "warmup_steps": 5})
    assert resolve(config(optim={"schedule": {"type": "one_cycle"}}), 1).warmup_steps == 0
    plain = OptimConfig.model_validate({"schedule": {"type": "one_cycle"}, "warmup_ratio": 0})
    assert plain.schedule.type == "one_cycle"


def test_lr_is_the_peak_times_the_multiplier() -> None:
    wanted = config(optim={"lr": 4e-3, "warmup_ratio": 0.05})
    plan = resolve(wanted, 1)
    rates = {step: wanted.optim.lr * lr_factor(step, wanted.optim, plan) for step in (1, 5, 6, 100, 101)}
    assert [rates[step] for step in (1, 5, 6)] == pytest.approx([8e-4, 4e-3, 4e-3])
    assert rates[101] == 0 and rates[100] > 0


LLAMA_DECAYS = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"} | {
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
}  # fmt: skip
GPT2_DECAYS = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)])
def test_matrices_decay_and_norms_biases_and_embeddings_do_not(name: str, tied: bool) -> None:
    model = build(name, tie_word_embeddings=tied)
    prefix, parts = ("model.layers", LLAMA_DECAYS) if name == "llama" else ("transformer.h", GPT2_DECAYS)
    decayed = {f"{prefix}.{i}.{part}.weight" for i in range(2) for part in parts}
    decayed |= set() if tied else {"lm_head.weight"}
    assert undecayed_names(model) == {key for key, _ in model.named_parameters()} - decayed


@pytest.mark.parametrize(
    ("name", "some"), [("falcon_mamba", True), ("jamba", True), ("mamba2", False), ("llama", False)]
)
def test_rates_of_states_do_not_decay_in_a_new_run(name: str, some: bool) -> None:
    """Mamba 1 has a matrix of them. An older run goes on as it was."""
    model, config = build(name), OptimConfig(weight_decay=0.3)
    rates = {key for key, each in model.named_parameters() if key.endswith("A_log") and each.ndim > 1}
    assert rates_of_states(model) == rates and bool(rates) is some
    older, newer = (groups_of(model, config, states_apart=apart) for apart in (False, True))
    assert {*older[0].names} - {*newer[0].names} == rates and older[0].weight_decay == newer[0].weight_decay == 0.3


def test_the_optimizer_has_every_weight_once(name: str = "gpt2") -> None:
    model = build(name)
    optimizer = build_optimizer(model, OptimConfig(lr=0.5, weight_decay=0.3, beta2=0.9))
    names = {name for name, _ in model.named_parameters()}
    decays, rest = optimizer.groups
    assert (decays.weight_decay, rest.weight_decay) == (0.3, 0.0)
    assert {*decays.names} == names - {*rest.names} and {*rest.names} == undecayed_names(model)
    assert len(decays.names) + len(rest.names) == len(names)
    assert decays.lr_ratio == rest.lr_ratio == 1.0


def test_the_second_matrices_of_adapters_may_learn_faster() -> None:
    """LoRA+; and what is frozen is in no group."""
    peft = pytest.importorskip("peft")
    model = build("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), model)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3), LoraMethod(type="lora", lr_ratio=16))
    found = {(group.lr_ratio, group.weight_decay): set(group.names) for group in optimizer.groups}
    at = "model.layers.{}.self_attn.q_proj.lora_{}.default.weight"
    assert found == {
        (1.0, 0.3): {at.format(i, "A") for i in range(2)},
        (1.0, 0.0): {at.format(i, "magnitude_vector") for i in range(2)},
        (16.0, 0.3): {at.format(i, "B") for i in range(2)},
    }


def test_factors_do_not_decay() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    peft.inject_adapter_in_model(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), model)
    (group,) = build_optimizer(model, OptimConfig(weight_decay=0.3)).groups
    assert group.weight_decay == 0.0 and len(group.names) == 2


def test_a_step_is_taken_at_a_fraction_of_the_peak_or_not_at_all() -> None:
    model = build("gpt2")
    optimizer = build_optimizer(model, OptimConfig(lr=0.5))
    optimizer.init_state()
    names = {f"{name}.{moment}" for name, _ in model.named_parameters() for moment in ("step", "exp_avg", "exp_avg_sq")}
    assert optimizer.state_tensors().keys() == names
    for found_inf in (1.0, 0.0):
        before = [tensor.clone() for tensor in [*model.parameters(), *optimizer.state_tensors().values()]]
        norm = model.transformer.ln_f.weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(0.25, torch.tensor(found_inf))
        same = [torch.equal(*pair) for pair in zip(before, _tensors(model, optimizer), strict=True)]
        assert all(same) if found_inf else not any(same)
        # The first update is the learning rate, whatever the gradient. A norm's weight does not decay.
        moved = norm - model.transformer.ln_f.weight
        assert torch.allclose(moved, torch.tensor(0.0 if found_inf else 0.125), atol=1e-6)
        assert all(parameter.grad is None for parameter in model.parameters())


def _tensors(model: Any, optimizer: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *optimizer.state_tensors().values()]
