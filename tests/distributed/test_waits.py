"""Nothing in a step asks the device for a value, which on a GPU would make the host wait for all that is queued."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import architecture
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, make_config

SLOW = pytest.mark.slow
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero")
ASKING = ("cpu", "tolist", "numpy", "item", "cuda", "__bool__", "__float__", "__int__", "__index__")

MAKING = ("tensor", "as_tensor", "from_numpy")
"""What makes tensors of values on the host, which would have to be copied to the device. A `.to(device)` of what is
there already, as networks have many, copies nothing."""


class Operations(TorchDispatchMode):
    """Operations that need a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(function) for word in WAITING):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Python's ways to bring a tensor, or a value of it, to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ASKING or name in MAKING:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def watched(values: Mapping[str, Any], disturb: bool) -> list[str]:
    """What a steady step asks for; with `disturb` a network in the middle of it asks, too."""
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.step.train_step import train_step
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    parts = assemble(config, *prepare_on_rank0(config), torch.device("cpu"))
    if disturb:
        norm = list(parts.model.modules())[-2]
        norm.register_forward_hook(lambda _, __, out: out * float(out.sum() != 0))
    found: list[str] = []
    for number, batches in enumerate(islice(parts.batches, 2)):
        operations, methods = Operations(), Methods()
        with methods, operations:
            train_step(
                parts.model, parts.optimizer, parts.scale, batches, plan=parts.plan, parallel=parts.parallel,
                optim=config.optim, lr_factor=1.0, seed=0,
            )  # fmt: skip
        if number:
            found += operations.found + methods.found
    return found


@pytest.mark.parametrize(
    ("model", "world"),
    [("gpt2", 2), ("gemma3_text", 1), *(pytest.param(*each, marks=SLOW) for each in (("gpt2", 1), ("gemma3_text", 2)))],
)
def test_a_step_asks_the_device_for_nothing(tmp_path: Path, model: str, world: int) -> None:
    network = GPT2 if model == "gpt2" else architecture(model, vocab_size=64)
    config = make_config(tmp_path, network, parallel={"precision": "bf16"})
    assert resident_ranks(watched, world, config.model_dump(), False) == [[]] * world


def watched_all(many: list[Mapping[str, Any]]) -> list[list[str]]:
    return [watched(values, False) for values in many]


def test_a_step_of_ranks_that_share_layers_or_samples_asks_for_nothing(tmp_path: Path) -> None:
    configs = [
        make_config(tmp_path, LLAMA, run={"name": axis}, parallel={"precision": "bf16", "mesh": {axis: 2}}).model_dump()
        for axis in ("tensor", "sequence")
    ]
    assert resident_ranks(watched_all, 2, configs) == [[[], []]] * 2


@SLOW
def test_no_optimizer_asks_the_device_for_anything(tmp_path: Path) -> None:
    chosen: dict[str, dict[str, Any]] = {
        "8bit": {"optimizer": {"type": "adamw", "moments": "8bit"}},
        "bf16": {"optimizer": {"type": "adamw", "moments": "bf16"}, "stochastic_rounding": True},
        **{kind: {"optimizer": {"type": kind}} for kind in ("sgd", "lion", "muon", "adafactor")},
    }
    configs = [
        make_config(tmp_path, GPT2, run={"name": name}, parallel={"precision": "bf16_pure"}, optim=optim)
        for name, optim in chosen.items()
    ]
    assert resident_ranks(watched_all, 2, [config.model_dump() for config in configs]) == [[[]] * len(chosen)] * 2


def test_one_that_asks_is_found(tmp_path: Path) -> None:
    (found,) = resident_ranks(watched, 1, make_config(tmp_path, GPT2).model_dump(), True)
    assert "aten._local_scalar_dense.default" in found


def waiting_alone(rank: int, port: int, found: Any, imported: Any) -> None:
    """A rank that waits for all, and then for the one that it shares a model with; they have joined, and hang."""
    from raytune_fsdp.base.collectives import make_device_mesh
    from raytune_fsdp.launch.worker import join

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4"}
    imported.wait(200)  # they have 3 seconds to meet, too
    join(torch.device("cpu"), alone=False, minutes=0.05)
    mesh = make_device_mesh("cpu", {"replicate": 2, "shard": 2})
    if rank:
        found.get()
        return
    for group in (None, mesh.get_group("shard")):
        since = time.monotonic()
        try:
            torch.distributed.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:
            found.put((time.monotonic() - since, str(error)))
        else:
            found.put((0.0, "it did not wait"))


@SLOW
def test_a_rank_gives_up_waiting_for_one_that_hangs() -> None:
    """After `cluster.collective_minutes`, here 3 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    found, hanging, imported = context.Queue(), context.Queue(), context.Barrier(4)
    ranks = [
        context.Process(target=waiting_alone, args=(rank, port, hanging if rank else found, imported))
        for rank in range(4)
    ]
    for rank in ranks:
        rank.start()
    waited = [found.get(timeout=240) for _ in range(2)]
    for _ in ranks:
        hanging.put(None)
    for rank in ranks:
        rank.join(30)
    for seconds, said in waited:
        assert 2.5 < seconds < 20, said
        assert "imed out" in said
