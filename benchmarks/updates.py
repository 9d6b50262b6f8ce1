"""Count the kernels of an update and the bytes that they move: operation by operation, and as one kernel.

    python -m benchmarks.updates [--only Lion] [--out benchmarks/results/updates.json]

Nothing is timed, no code is compiled, and no GPU is needed. Operation by operation, each operation on 1,024 x 4,096
numbers is counted with what it reads and writes. As one kernel, the rule goes through torch.compile up to inductor's
schedule for a GPU (an H100's properties), and counted are the kernels of that schedule and the buffers that each of
them reads and writes. A fused update needs to read weight, gradient and state once, and to write weight and state once.
Exits with 1 if a schedule moves more than 1.3 times that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch import nn
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.inductor import Count, scheduled_for_gpu
from benchmarks.record import write_result
from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.compile_layers import Compiler
from raytune_fsdp.predict.trace.work import tensors_in, work_of
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.execution import AsKernel, ByOperation, Change, Execution
from raytune_fsdp.step.optim.groups import groups_of, trained
from raytune_fsdp.step.optim.muon import Muon
from raytune_fsdp.step.optim.update import Trained

BOUND = 1.3
ROWS, COLUMNS = 1024, 4096
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "AdamW, moments in 8 bits": (torch.float32, {"optimizer": {"type": "adamw", "moments": "8bit"}}),
    "AdamW, moments in bf16": (torch.float32, {"optimizer": {"type": "adamw", "moments": "bf16"}}),
    "AdamW, bf16 weights, rounded stochastically": (torch.bfloat16, {"stochastic_rounding": True}),
    "AdamW, both of these": (
        torch.bfloat16, {"optimizer": {"type": "adamw", "moments": "8bit"}, "stochastic_rounding": True},
    ),
    "Lion": (torch.float32, {"optimizer": {"type": "lion"}}),
    "SGD with momentum": (torch.float32, {"optimizer": {"type": "sgd"}}),
    "Adafactor, without its sums": (torch.float32, {"optimizer": {"type": "adafactor"}}),
    "Muon, without its products": (torch.float32, {"optimizer": {"type": "muon"}}),
}  # fmt: skip
"""Type of the weights, and `optim`."""


class _Operations(TorchDispatchMode):
    """Counts operations as a prediction does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count(0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if found := work_of(func, args, kwargs or {}, result, 1):
            self.count += Count(1, found.nbytes)
        return result


class _Watched(ByOperation):
    """Counts what rules do, and the least that they have to move."""

    def __init__(self) -> None:
        self.operations = _Operations()
        self.needed = 0

    def __call__(self, change: Change, into: Any, *args: Any) -> None:
        changed, read = (sum(each.nbytes for each in tensors_in(given)) for given in (into, args))
        self.needed += 2 * changed + read
        with self.operations:
            super().__call__(change, into, *args)


def step(case: str, execution: Execution, rows: int) -> None:
    """Take one step of an optimizer over one matrix."""
    dtype, values = CASES[case]
    config = OptimConfig.model_validate({"weight_decay": 0.1, **values})
    model = nn.Linear(COLUMNS, rows, bias=False, dtype=dtype)
    model.weight.grad = torch.zeros_like(model.weight)
    if config.optimizer.type == "muon":
        weights = Trained(trained(model), groups_of(model, config), lr=0.1, seed=0, stochastic_rounding=False)
        optimizer: Any = Muon(weights, {"weight": lambda whole: [whole]}, None, config.optimizer, execution)
    else:
        optimizer = build_optimizer(model, config, execution=execution)
    with patch("raytune_fsdp.step.optim.muon.orthogonal", lambda matrix, _: matrix):  # its products are not counted
        optimizer.step(1.0, torch.zeros(()))


def by_operation(case: str) -> tuple[Count, int]:
    """Return what a step launches and moves for ROWS rows, and the bytes that a fused one would have to move."""
    execution = _Watched()
    with FakeTensorMode(allow_non_fake_inputs=True):
        step(case, execution, ROWS)
    return execution.operations.count, execution.needed


def scheduled(run: Callable[[], None]) -> list[Count]:
    """Return what inductor schedules for each graph of `run`, which itself goes on without the compiler."""
    found: list[Count] = []

    def count(graph: GraphLowering) -> None:
        assert isinstance(graph.module, torch.fx.GraphModule) and graph.example_inputs is not None
        found.append(scheduled_for_gpu(graph.module, graph.example_inputs, graph._shape_env))
        raise NotImplementedError("counted")

    with (
        patch.object(GraphLowering, "compile_to_module", count),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        run()
    return found


class _Scheduled(ByOperation):
    """Counts each rule as inductor schedules it."""

    def __init__(self) -> None:
        self.count = Count(0, 0)

    def __call__(self, change: Change, into: Any, *args: Any) -> None:
        # A compiler of its own: after each count it gives up.
        kernel = AsKernel(Compiler(), alone=True)
        (found,) = scheduled(lambda: kernel(change, into, *args))
        self.count += found

    def number(self, value: float, device: torch.device) -> Any:
        return torch.full((), value, dtype=torch.float64, device=device)


def as_kernel(case: str, rows: int = 64) -> Count:
    """Return what a step of so many rows launches and moves with one kernel for each rule."""
    execution = _Scheduled()
    step(case, execution, rows)
    return execution.count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for case in arguments.only:
        before, needed = by_operation(case)
        after = as_kernel(case)
        each = {
            "operations": before.kernels,
            "operations_bytes": before.nbytes / (ROWS * COLUMNS),
            "kernels": after.kernels,
            "kernels_bytes": after.nbytes / (64 * COLUMNS),
            "needed_bytes": needed / (ROWS * COLUMNS),
        }
        result[case] = each
        print(f"{case:45}" + "  ".join(f"{key} {value:.4g}" for key, value in each.items()), flush=True)
    if arguments.out:
        write_result(arguments.out, result)
    return int(any(each["kernels_bytes"] > BOUND * each["needed_bytes"] for each in result.values()))


if __name__ == "__main__":
    sys.exit(main())
