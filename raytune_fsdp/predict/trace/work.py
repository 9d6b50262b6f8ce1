"""The work of one operation: floating-point operations, and bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

Sort = Literal["products", "attention", "attention backward", "narrowing", "rest", "collective", "exchange", "sum"]
"""What an operation does. `narrowing`: to 8 bits, with the search for the largest number. `exchange`: tokens for heads,
among the ranks that share samples. `sum`: adds up what the ranks have computed that have each a part of a layer.
`collective`: all others, whose bytes are known."""


class Operation(NamedTuple):
    sort: Sort
    flops: float
    nbytes: int
    """Bytes that are read and written; for an exchange, all that it sends; for a sum, what is added up."""
    itemsize: int
    """Bytes of each number that is multiplied: 2 in 16 bits, 1 in 8."""
    sides: tuple[int, int] = (0, 0)
    """For a product its two shortest sides, for attention the width of a head and the length of a document: they decide
    how much of a device it can use."""


_ATTENTION = {
    # By name, and how many products of two matrices as large as the scores each computes. Forward: scores and values.
    # Backward: scores once more, and the gradients of scores, queries, keys and values.
    "_varlen_attn": 2,
    "_varlen_attn_backward": 5,
    "sdpa_by_document": 2,
    "sdpa_by_document_backward": 5,
    "varlen_attention_with_sinks": 2,
    "varlen_attention_with_sinks_backward": 5,
}

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")

NOTHING = (
    "detach", "alias", "lift_fresh", "_unsafe_view", "empty", "new_empty", "empty_like", "empty_strided",
    "new_empty_strided",
)  # fmt: skip
"""Operations that compute nothing, besides those that say themselves that they return views."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return all tensors, those of a DTensor as this rank has them."""
    found: list[torch.Tensor] = []
    for each in pytree.tree_leaves(values):
        if isinstance(each, DTensor):
            each = each._local_tensor
        if isinstance(each, torch.Tensor):
            found.append(each)
    return found


def name_of(func: Any) -> str:
    """Return the name of an operation, without its namespace."""
    return str(func._schema.name.partition("::")[2])


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, longest: int) -> Operation | None:
    """Return what an operation does; None if it only looks at something in another way.

    `longest`: tokens of a document.
    """
    name = name_of(func)
    made = tensors_in(result)
    if func.is_view or name in NOTHING or (not made and func.namespace != "aten"):
        return None
    given = tensors_in((args, kwargs))
    if func.namespace.startswith("_c10d_functional"):
        sorts: dict[str, Sort] = {"all_to_all_single": "exchange", "all_reduce": "sum"}
        return Operation(sorts[name], 0.0, given[0].nbytes, 0) if name in sorts else None
    nbytes = sum(each.nbytes for each in given) + sum(each.nbytes for each in made)
    if name in _ATTENTION:
        queries = next(each for each in given if each.ndim == 3)
        window = next((each for each in args if isinstance(each, int) and not isinstance(each, bool) and each), 0)
        # Pairs of a query and a key that it sees, in documents that are all equally long.
        seen = min(longest, window) if window and "window" in name else longest
        pairs = queries.shape[0] * (seen - seen * (seen - 1) / (2 * max(1, longest)))
        flops = 2.0 * _ATTENTION[name] * pairs * queries.shape[1] * queries.shape[2]
        sort: Sort = "attention backward" if name.endswith("backward") else "attention"
        return Operation(sort, flops, nbytes, queries.itemsize, (queries.shape[2], longest))
    if name in _PRODUCTS:
        matrices = [each for each in given if each.ndim >= 2]
        # What is added to a product comes before its factors, and the scales of rows behind them.
        matrices = matrices[:2] if name == "_scaled_mm" else matrices[-2:]
        small, large, _ = sorted((*matrices[0].shape[-2:], matrices[1].shape[-1]))
        # Products of (.., m, k) and (.., k, n). Experts have the tokens of all of them in one matrix.
        left, right = matrices
        return Operation("products", 2.0 * left.numel() * right.shape[-1], nbytes, matrices[0].itemsize, (small, large))
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        sort = "products" if "attention" not in name else "attention backward" if "backward" in name else "attention"
        return Operation(sort, float(count(*args, **kwargs, out_val=result)), nbytes, given[0].itemsize)
    return Operation("rest", 0.0, nbytes, 4)
