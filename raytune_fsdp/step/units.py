"""FSDP's own record of its units: which weights each has, and in which pieces."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_groups_of(model: nn.Module) -> list[Any]:
    """Return FSDP's own record of each unit that has weights."""
    return [group for module in model.modules() if isinstance(module, FSDPModule) for group in groups_of_unit(module)]


def groups_of_unit(module: FSDPModule) -> list[Any]:
    """Return FSDP's own record of the unit of this module; none if it has no weights."""
    state = module._get_fsdp_state()  # type: ignore[attr-defined]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11
