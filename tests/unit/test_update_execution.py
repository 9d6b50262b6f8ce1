"""Updates as one kernel: as few bytes as a fused one, the bits of their operations, and what is on record of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.updates import BOUND, CASES, COLUMNS, ROWS, as_kernel, by_operation
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.compile_layers import COMPILED, EAGER, Compiler, settings_restored
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.predict.speed import phases_of
from raytune_fsdp.predict.trace.trace import trace
from raytune_fsdp.predict.trace.work import Operation
from raytune_fsdp.run.beginning import beginning_of, put_beginning
from raytune_fsdp.run.trials import update
from raytune_fsdp.run.trials.needs import network_needs
from raytune_fsdp.run.trials.update import choose_update, why_update_differs
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.execution import BY_OPERATION, AsKernel, Execution
from tests.unit.test_planner_memory import LLAMA, config_of

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "8bit": {"optimizer": {"type": "adamw", "moments": "8bit"}},
    "bf16": {"optimizer": {"type": "adamw", "moments": "bf16"}},
    "sgd": {"optimizer": {"type": "sgd", "nesterov": True}},
    "lion": {"optimizer": {"type": "lion"}},
    "muon": {"optimizer": {"type": "muon"}},
    "adafactor": {"optimizer": {"type": "adafactor"}},
}


def optim(kind: str, **values: Any) -> OptimConfig:
    return OptimConfig.model_validate({**KINDS[kind], "lr": 0.01, "weight_decay": 0.1, **values})


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Graphs are made as on a GPU, and run operation by operation: inductor takes many seconds for its code. Returns
    the number of each graph's operations."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop

    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(len(graph.graph.nodes))
        return aot_autograd(fw_compiler=nop)(graph, inputs)

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda change, fullgraph, options: compiled(
        change, fullgraph=fullgraph, backend=backend
    ))  # fmt: skip
    with settings_restored():
        yield made
    torch._dynamo.reset()


# ---- bytes, by count ----

NEEDED = {
    "AdamW, moments in 8 bits": 16.1,
    "AdamW, moments in bf16": 20,
    "AdamW, bf16 weights, rounded stochastically": 14,
    "AdamW, both of these": 10.1,
    "Lion": 20,
    "SGD with momentum": 20,
    "Adafactor, without its sums": 12,
    "Muon, without its products": 32,
}
"""Bytes of a number."""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its schedule is read with the names of 2.13")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case != "Lion" else []) for case in CASES],
)
def test_a_kernel_moves_what_a_fused_update_needs(case: str) -> None:
    """By count, as inductor schedules it for a GPU. Operation by operation it is 5 to 80 times as much."""
    with settings_restored():
        found, (before, needed) = as_kernel(case), by_operation(case)
    assert found.kernels == (2 if "Muon" in case else 1), "the momentum and the weight of Muon are apart in time"
    assert found.nbytes / (64 * COLUMNS) <= BOUND * needed / (ROWS * COLUMNS)
    assert before.nbytes > 4 * needed and before.kernels > 8
    assert round(needed / ROWS / COLUMNS, 1) == NEEDED[case], "weights, gradients and moments, in their types"


@pytest.mark.slow
def test_a_plan_counts_an_update_on_a_gpu_as_one_kernel() -> None:
    """Of the 11 layers two are traced, with 9 weights each, and three weights are in no layer."""

    def update_of(device: str, **sections: Any) -> list[Operation]:
        asked = {"optimizer": {"type": "adamw", "moments": "8bit"}}
        config = config_of(LLAMA, optim=asked, train={"global_batch": 2}, **sections)
        hf_config = load_architecture(config.model, None)
        needs = network_needs(config, hf_config, build_network(hf_config, config))
        found = trace(config, hf_config, needs, resolve(config, 1), memory=80 << 30, device=device)
        return list(dict(phases_of(found))["update"])

    here, there, eager = update_of("cpu"), update_of("cuda"), update_of("cuda", parallel={"compile": False})
    assert len(eager) == len(here) > 20 * len(there)
    moved = [sum(each.nbytes for each in every) for every in (here, there, eager)]
    assert moved[0] == moved[2] > 30 * moved[1]


# ---- bits ----


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_have_the_bits_of_the_operations(kind: str, without_code: list[int]) -> None:
    """And there are few: one for each width of weights and way to keep them, whatever their rows and the step."""
    dtype = torch.float32 if kind == "muon" else torch.bfloat16
    asked = optim(kind, stochastic_rounding=dtype == torch.bfloat16)
    assert why_update_differs(asked, CPU, dtype, exact=True) is None
    assert 1 <= len(without_code) <= 6


def after(kind: str, execution: Execution) -> dict[str, torch.Tensor]:
    """Weights and state of a small matrix after three steps, the second of which is skipped."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 600, generator=generator).bfloat16() for _ in range(4)]
    model = nn.Linear(600, 8, bias=False, dtype=torch.bfloat16)
    model.weight = nn.Parameter(values[0])
    optimizer: Any = build_optimizer(model, optim(kind, stochastic_rounding=True), execution=execution)  # type: ignore[arg-type]
    for gradient, bad in zip(values[1:], (0.0, 1.0, 0.0), strict=True):
        model.weight.grad = gradient
        optimizer.step(1.0, torch.tensor(bad))
    return {"weight": model.weight.detach(), **optimizer.state_tensors()}


def test_noise_is_looked_up_by_place_in_graphs_too(without_code: list[int]) -> None:
    """600 columns are two groups and a shorter one; parts of 512 numbers are some of one row."""
    whole, kernel = after("8bit", BY_OPERATION), AsKernel(Compiler(), alone=True)
    kernel.at_once = 512
    parts = after("8bit", kernel)
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
    assert len(without_code) == 3, "of two groups, of the shorter one, and of what one row is alone"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lion", "bf16"])
def test_code_for_a_cpu_has_the_bits_of_the_operations(kind: str) -> None:
    """But for roots: those of MKL, which torch's operations take, are not always the nearest."""
    with settings_restored():
        asked = optim(kind, stochastic_rounding=True)
        assert why_update_differs(asked, CPU, torch.bfloat16, exact=kind == "lion") is None


# ---- what gives way, and what is on record ----


def test_a_compiler_that_fails_gives_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no code for this one")

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda change, **_: compiled(change, fullgraph=True, backend=backend))
    with settings_restored():
        compiler = Compiler("the update of a weight")
        found, whole = after("lion", AsKernel(compiler, alone=True)), after("lion", BY_OPERATION)
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        assert compiler.failure is not None and "BackendCompilerFailed" in compiler.failure
        assert len([each for each in caplog.records if each.name.startswith("raytune_fsdp")]) == 1, "said once"
        assert compiler.news() == (0, compiler.failure)
        why = why_update_differs(optim("lion"), CPU, torch.float32, exact=False)
    assert why is not None and "BackendCompilerFailed" in why


def test_the_first_step_is_tried_without_effect_and_agreed_on(without_code: list[int]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Elsewhere(Compiler):
        """On another rank nothing can be compiled."""

        def agree(self) -> None:
            super().agree()
            self.give_up("torch.compile has failed on another rank")

    whole = after("sgd", BY_OPERATION)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        for kind in (Compiler, Elsewhere):
            layers, compiler = Compiler(), kind("the update of a weight")
            found = after("sgd", AsKernel(compiler))
            assert all(torch.equal(found[name], whole[name]) for name in whole)
            graphs, failure = compiler.news()
            assert graphs == 1, "compiled before anything was agreed on"
            assert (failure is None) == (kind is Compiler)
            assert layers.news() == (0, None), "graphs of updates are not those of layers"
    finally:
        dist.destroy_process_group()


def test_a_kernel_that_computes_something_else_is_found(
    without_code: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Off(AsKernel):
        def number(self, value: float, device: torch.device) -> torch.Tensor:
            return super().number(value * self.by if value < 0.1 else value, device)  # the rate, not the decay

    monkeypatch.setattr(update, "AsKernel", Off)
    for by, exact, why in (
        (1.01, False, "is off by 0.01 of"),
        (1 + 1e-7, True, "run.exact: "),
        (1 + 1e-7, False, None),
    ):
        Off.by = by  # type: ignore[attr-defined]
        found = why_update_differs(optim("lion"), CPU, torch.float32, exact=exact)
        assert found is None if why is None else found is not None and why in found


def test_a_run_begun_before_keeps_its_operations(tmp_path: Path) -> None:
    def chosen(asked: bool | str, kept: str | None, fails: str | None = None) -> tuple[str, str]:
        choice = choose_update(asked, kept=kept, fails=lambda: fails)
        return choice.name, choice.why

    assert chosen("auto", None)[0] == chosen(True, COMPILED)[0] == COMPILED
    assert chosen("auto", EAGER) == chosen(True, EAGER) == (EAGER, "as the run began")
    assert chosen(False, COMPILED) == (EAGER, "as parallel.compile says")
    assert chosen("auto", COMPILED, "no Triton") == (EAGER, "no Triton")
    place = RunDir(tmp_path / "again", "")
    for kernels, began in (({"attention": "sdpa"}, EAGER), ({"update": COMPILED}, COMPILED)):
        put_beginning(place, RunState(kernels=kernels))
        assert beginning_of(place)[0].kernels["update"] == began, "what an audit repeats begins as its run did"
