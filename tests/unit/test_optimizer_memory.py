"""What an update holds besides weights and state, and where it holds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim import muon, pieces
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.moments import MOMENT_GROUP
from tests.models import build

GO = torch.tensor(0.0)
KINDS: dict[str, dict[str, Any]] = {
    "8bit": {"optimizer": {"type": "adamw", "moments": "8bit"}},
    "bf16": {"optimizer": {"type": "adamw", "moments": "bf16"}},
    "sgd": {"optimizer": {"type": "sgd"}},
    "lion": {"optimizer": {"type": "lion"}},
    "muon": {"optimizer": {"type": "muon"}},
    "adafactor": {"optimizer": {"type": "adafactor"}},
}


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most numbers that a tensor has that is not a view of another."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.name.endswith("_"):
            self.most = max([self.most, *(t.numel() for t in tree_leaves(found) if isinstance(t, torch.Tensor))])
        return found


def stepped(kind: str, largest: Largest | None = None) -> dict[str, torch.Tensor]:
    """Weights and state after two steps, of a network in which an expert is 4,096 numbers and more."""
    model = build("mixtral", intermediate_size=72).bfloat16()
    config = OptimConfig.model_validate({**KINDS[kind], "lr": 0.01, "weight_decay": 0.1, "stochastic_rounding": True})
    optimizer = build_optimizer(model, config)
    optimizer.init_state()
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        if largest is None:
            optimizer.step(1.0, GO)
            continue
        with largest:
            optimizer.step(1.0, GO)
    return {**{name: p.detach() for name, p in model.named_parameters()}, **optimizer.state_tensors()}


@pytest.mark.parametrize(
    "kind", ["8bit", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bf16", "sgd")), "lion"]
)
def test_an_expert_is_updated_in_parts_and_no_bit_differs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that is worked on at once was one row, an expert of Mixtral took 4.7 GB."""
    whole = stepped(kind)
    at_once = 2 * MOMENT_GROUP
    monkeypatch.setattr(pieces, "NUMBERS_AT_ONCE", at_once)
    largest = Largest()
    for name, tensor in stepped(kind, largest).items():
        assert torch.equal(tensor, whole[name]), name
    assert largest.most == at_once
    assert pieces.NUMBERS_AT_ONCE % MOMENT_GROUP == 0, "parts end where blocks do"


# ---- weights on the host, ranks on GPUs ----


class OnFirstGpu(torch.overrides.TorchFunctionMode):
    """A torch without CUDA does not know which GPU is meant by "cuda", nor how to copy there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and args[0].is_cuda:
            assert args[1].is_cuda
            return args[0]
        if func is torch.Tensor.contiguous and args[0].is_cuda:
            return args[0].clone(memory_format=torch.contiguous_format)
        return func(*("cuda:0" if each == "cuda" else each for each in args), **(kwargs or {}))


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """One of two ranks that never answer: only devices and types are looked at."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def on_the_host(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Half of its rows, for a mesh of two. `from_local` would send them to the mesh's device."""
    local = torch.empty(-(-tensor.shape[0] // 2), *tensor.shape[1:], device="meta")
    there = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
    return torch.zeros_like(there, device="cpu")


@pytest.mark.parametrize("kind", [pytest.param("lion", marks=pytest.mark.slow), "muon", "adafactor"])
def test_with_weights_on_the_host_nothing_else_stays_on_the_gpu(
    kind: str, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with parallel.cpu_offload: weights on the host, a mesh of GPUs. A product of both devices would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    monkeypatch.setattr(muon.Many, "kinds", ())  # it would compare values
    mesh = init_device_mesh("cuda", (2,))
    products: set[tuple[str, torch.dtype]] = set()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                products.add((args[0].device.type, args[0].dtype))
            return func(*args, **(kwargs or {}))

    model = build("mixtral", num_local_experts=4)
    with FakeTensorMode(), OnFirstGpu():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(on_the_host(parameter, mesh))
        optimizer = build_optimizer(model, OptimConfig.model_validate(KINDS[kind]))
        for parameter in model.parameters():
            parameter.grad = on_the_host(parameter, mesh)
        with Products():
            optimizer.step(1.0, torch.zeros((), device="cuda:0"))
        kept = [*model.parameters(), *optimizer.state_tensors().values()]
        assert {local_piece(tensor).device.type for tensor in kept} == {"cpu"}
    assert products == ({("cuda", torch.bfloat16)} if kind == "muon" else set()), "as without parallel.cpu_offload"
