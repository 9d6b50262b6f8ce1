"""Ranks over gloo on this machine, for benchmarks that do without Ray: forked from a server that has the imports."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raytune_fsdp.base.batch import StepBatches
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.run.loop import RankRun
from raytune_fsdp.step.parallel import make_mesh
from raytune_fsdp.step.train_step import StepTensors, train_step

IMPORTED = ["torch.distributed.checkpoint", "transformers.models.llama.modeling_llama", "raytune_fsdp.run.assemble"]
"""By the server, once. None of them starts a thread."""


def run_ranks(function: Callable[..., None], world: int, *arguments: Any) -> None:
    """Call `function(*arguments)` in new processes, one for each rank, with one thread each. Waits for their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(IMPORTED)
    given = (world, port, function, arguments)
    torch.multiprocessing.start_processes(_rank, given, nprocs=world, start_method="forkserver")


def _rank(rank: int, world: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def mesh() -> DeviceMesh:
    """The mesh over all ranks that a plan makes by default. Collective."""
    world = dist.get_world_size()
    layout = Layout(world=world, data_ranks=world, replicas=1, shard_size=world)
    return make_mesh(layout, torch.device("cpu"))


def one_step(parts: RankRun, batches: StepBatches) -> StepTensors:
    """Train a step of a run that is assembled, at its full rate. Collective."""
    return train_step(
        parts.model, parts.optimizer, parts.scale, batches, plan=parts.plan, parallel=parts.parallel,
        optim=parts.config.optim, lr_factor=1.0, seed=0, objective=parts.objective, sums=parts.sums,
    )  # fmt: skip


def slowest(seconds: float) -> float:
    """Of all ranks. Collective."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()
