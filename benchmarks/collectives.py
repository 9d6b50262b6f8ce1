"""Counts what the collectives of a rank move while it trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("gathered", "scattered", "all_reduced")
_OPERATIONS = {
    "c10d::_allgather_base_": "gathered",
    "c10d::_reduce_scatter_base_": "scattered",
    "c10d::alltoall_base_": "scattered",
}
_PASSED_ON: dict[str, Callable[[int], int]] = {
    "c10d::recv_": lambda others: 1,
    "c10d::send": lambda others: 0,
    "c10d::gather_": lambda others: max(0, others - 1),
    "c10d::scatter_": lambda others: 0 if others else 1,
}
"""How many tensors a rank receives, by how many there are besides its own: the other ranks' or none."""


class Collectives(TorchDispatchMode):
    """Adds up what a rank receives, by kind: numbers, and bytes. Backward runs in this thread on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "_c10d_functional::all_to_all_single":
            self._add("exchanged", args[0], len(args[1]))
        elif func._schema.name == "_c10d_functional::all_reduce":
            self._add("summed", args[0], _resolve_process_group(args[2]).size(), 2)
        elif func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            group = next(leaf for leaf in tree_leaves(args) if hasattr(leaf, "_type_") or "ProcessGroup" in str(leaf))
            self._count(func._schema.name, tensors, torch.distributed.ProcessGroup.unbox(group).size())
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, tensors: list[torch.Tensor], ranks: int) -> None:
        largest = max(tensors, key=torch.Tensor.numel)
        kind, times = _OPERATIONS.get(operation), 1
        if operation == "c10d::allreduce_":
            # Counts and sums of a step are integers and doubles; gradients are neither here.
            kind = "all_reduced" if largest.dtype not in (torch.int64, torch.float64) else "beside"
            times = 2
        if operation in _PASSED_ON:
            received = _PASSED_ON[operation](len(tensors) - 1) if tensors else 0
            self.numbers["scattered"] += received * largest.numel()
            self.bytes["scattered"] += received * largest.nbytes
            return
        if operation == "c10d::broadcast_":  # gradients of weights that are not cut
            kind = "beside"
        assert kind is not None, f"{operation} is not known here"
        self._add(kind, largest, ranks, times)

    def _add(self, kind: str, tensor: torch.Tensor, ranks: int, times: int = 1) -> None:
        self.numbers[kind] += times * tensor.numel() * (ranks - 1) / ranks  # type: ignore[assignment]
        self.bytes[kind] += times * tensor.nbytes * (ranks - 1) / ranks  # type: ignore[assignment]
