"""Steps of a model without a run: random weights, full batches, and nothing that is kept."""

from __future__ import annotations

import copy
import time

import torch
import torch.distributed as dist

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.shared_batches import own_parts
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.network import build_network
from raytune_fsdp.model.split.sequence import use_parts
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.subject import Subject
from raytune_fsdp.predict.trace.trace import choose_kernels, full_batches, one_step, optimizer_of
from raytune_fsdp.run.assemble import as_stored, spread
from raytune_fsdp.step.optim import local_piece
from raytune_fsdp.step.parallel import make_groups, make_mesh, memory_of, units_of


class Trainer:
    """On every rank of a process group: a network of random weights, spread as a run would spread it."""

    def __init__(self, config: FinetuneConfig, device: torch.device) -> None:
        """`config`: of a random network, with a length in steps."""
        subject, self._device = Subject.of(config), device
        self._config, self._plan = config, resolve(config, dist.get_world_size())
        model = build_network(copy.deepcopy(subject.hf_config), config)
        choose_kernels(model, config, subject.needs, device.type)
        self._parallel = as_stored(model, config, self._plan.layout, memory_of(device), device.type)
        units = units_of(model, self._parallel, ends=subject.needs.ends)
        spread(model, units, self._parallel, make_mesh(self._plan.layout, device), None, device)
        fill(model, None, "empty", device)
        with torch.no_grad():
            for parameter in model.parameters():
                local_piece(parameter).normal_(std=0.02)
        self._model = model.train()
        passes = self._plan.division.full_rounds
        self._optimizer = optimizer_of(config, self._plan, self._parallel, model, units, passes)
        batches = full_batches(config, subject.hf_config, passes)
        if (members := make_groups(self._plan.layout, device).sequence) is not None:
            use_parts(model, members)
        parts = own_parts([batches], self._plan.layout, dist.get_rank())
        self._batches = next(to_device(parts, device))

    def step(self) -> float:
        """Train one step; returns the seconds that it took on the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        one_step(self._config, self._plan, self._parallel, self._model, self._optimizer, self._batches, self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent)
