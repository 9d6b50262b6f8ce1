"""What the planner says of a run, to stand beside what was measured: the only caller of the planner here."""

from __future__ import annotations

import torch

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError, in_one_line
from raytune_fsdp.estimate.devices import find_device
from raytune_fsdp.parallel import memory_of as memory_here
from raytune_fsdp.plan import Plan
from raytune_fsdp.planner.memory import Memory, memory_of
from raytune_fsdp.planner.trace import trace
from raytune_fsdp.run.standing import Prepared


def device_bytes(device: str) -> int | None:
    """The memory of a device as the record names it (`cuda: NVIDIA H100 80GB HBM3`); of a CPU, that of this machine.
    None: not known."""
    kind, _, name = device.partition(": ")
    if kind == "cuda":
        try:
            return int(find_device(name).memory)
        except ConfigError:
            here = torch.cuda.is_available() and torch.cuda.get_device_name(0) == name
            return memory_here(torch.device("cuda", 0)) if here else None
    return memory_here(torch.device("cpu"))


def predicted(config: FinetuneConfig, prepared: Prepared, plan: Plan, device: str) -> tuple[Memory | None, str]:
    """The peak of a step in which every token is trained on; or None, and why it is not predicted."""
    size, kind = device_bytes(device), device.partition(": ")[0]
    if size is None:
        return None, f"the memory of {device} is not known"
    try:
        traced = trace(
            config, prepared.hf_config, prepared.needs, plan,
            memory=size, device=kind, added=tuple(prepared.added), gloo=kind == "cpu",
        )  # fmt: skip
        return memory_of(traced), ""
    except Exception as error:  # of a network that operations on tensors without data do not suit: it was measured
        return None, in_one_line(error)
