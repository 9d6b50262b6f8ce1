"""Have state mixers start from nothing with each document, on every device and without any package.

A state mixer is what looks back at earlier tokens without attention: a state space (Mamba), a delta rule, a short
convolution. It runs through the whole row that it gets, and a micro-batch is one row of documents. So each mixer is
called for the documents themselves, several of about the same length side by side: one that is shorter repeats its last
token, and nothing in a mixer looks ahead. Which modules these are, `run/trials/mixers.py` finds out.

Packages have kernels that take borders themselves. The mixer is then called once, with the names that it and its
kernels have for them, where a trial has shown that all of them, its convolution included, do as they are told.

A mixer's forward is replaced on the instance, and all mixers of a network read the borders of the micro-batch from one
`Documents`. A layer that is computed again in backward finds those of the same micro-batch there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from raytune_fsdp.model.attention.calls import Unfit

BY_DOCUMENT = "by_document"
"""The name, in records and checkpoints, of mixers that are called for documents."""

WITH_BORDERS = {"borders_cu_seq_lens_q": ("cu_seq_lens_q", "seq_idx"), "borders_cu_seqlens": ("cu_seqlens", "seq_idx")}
"""By their names in records, the ways to call mixers once: the names of two arguments. The first is where documents
begin, for delta rules, the second the number of each token's document, for convolutions and Mamba's kernels."""

BORDERS = "document_borders"
"""The argument with which a split network gets its `Borders`: they are on the host, where its layers need them."""

_OF_THE_ROW = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx"})
"""Arguments that describe the whole row to a mixer or to its kernels."""

_SPARE = 8
"""Of so many tokens that a mixer computes, at most one is there because documents differ in length."""


class Documents:
    """The documents of the micro-batch that a network computes, as its mixers get them."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.borders: dict[str, torch.Tensor] = {}
        """Arguments of a mixer that takes borders."""
        self.batches: Sequence[torch.Tensor] = ()
        """For each call of a mixer that takes none, the places of its tokens in the row, (documents, tokens)."""
        self.back: torch.Tensor | None = None
        """For each token of the row, its place in the results of all calls."""

    def begin(self, lengths: Sequence[int], device: torch.device) -> None:
        """Prepare for a micro-batch of documents of these lengths."""
        if self.way == BY_DOCUMENT:
            batches, back = _places(lengths)
            self.back, *self.batches = _sent([back, *batches], device)
            return
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
        self.borders = dict(zip(WITH_BORDERS[self.way], _sent([starts, numbers], device), strict=True))

    def end(self) -> None:
        """Have mixers called as upstream does, as for a text that is generated."""
        self.borders, self.batches, self.back = {}, (), None


def _sent(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[torch.Tensor]:
    """Return these as tensors on the device, in one copy that the host need not wait for."""
    sent = torch.from_numpy(np.concatenate([each.reshape(-1) for each in arrays]))
    sent = (sent.pin_memory() if device.type == "cuda" else sent).to(device, non_blocking=True)
    pieces = torch.split(sent, [each.size for each in arrays])
    return [piece.view(each.shape) for piece, each in zip(pieces, arrays, strict=True)]


def split_mixers(network: PreTrainedModel, names: Iterable[str], way: str = BY_DOCUMENT) -> None:
    """Keep documents apart in the modules of these classes, in this way."""
    documents, wanted = Documents(way), {*names}
    for module in network.modules():
        if type(module).__name__ in wanted:
            split_mixer(module, documents)
    network.register_forward_pre_hook(partial(_begin, documents), with_kwargs=True)
    network.documents = documents  # type: ignore[assignment]


def split_mixer(mixer: nn.Module, documents: Documents) -> None:
    mixer.forward = partial(_forward, documents, mixer)


def is_split(network: nn.Module) -> bool:
    """Return whether a network's mixers are called for documents."""
    return hasattr(network, "documents")


def _begin(documents: Documents, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Note the borders that a network is called with."""
    borders, positions = kwargs.pop(BORDERS, None), kwargs.get("position_ids")
    if kwargs.get("use_cache") is not False or (borders is None and positions is None):
        documents.end()
    elif borders is not None:
        lengths = borders.lengths or np.diff(borders.starts.tolist()).tolist()
        documents.begin(lengths, borders.starts.device)
    elif positions is not None:  # the host waits for the device here: a run has borders
        starts = positions.reshape(-1).eq(0).nonzero().flatten().tolist()
        documents.begin(np.diff([*starts, positions.numel()]).tolist(), positions.device)
    return args, kwargs


def _places(lengths: Sequence[int]) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return the places of tokens in the row for each call, and of the row's tokens in the results of all calls."""
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    batches, back, computed = [], np.empty(sizes.sum(), dtype=np.int64), 0
    for numbers in _alike(lengths):
        columns = np.arange(sizes[numbers[0]])
        batches.append(starts[numbers, None] + np.minimum(columns, sizes[numbers, None] - 1))
        for number in numbers:
            back[starts[number] : starts[number] + sizes[number]] = computed + columns[: sizes[number]]
            computed += columns.size
    return batches, back


def _alike(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield documents, by their numbers, that are computed side by side. The first of each is the longest."""
    group: list[int] = []
    own = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        filled = own + lengths[number]
        if group and (len(group) + 1) * lengths[group[0]] * (_SPARE - 1) > filled * _SPARE:
            yield group
            group, filled = [], lengths[number]
        group, own = [*group, number], filled
    yield group


# Not compiled: each mixture of lengths would be a graph of its own.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(documents: Documents, mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a mixer for the documents of the micro-batch; as upstream does, if there are none."""
    forward = partial(type(mixer).forward, mixer)
    if not documents.batches and not documents.borders:
        return forward(*args, **kwargs)
    values, shape, row = _arguments(args, kwargs)
    call = _by_document if documents.way == BY_DOCUMENT else _with_borders
    return call(documents, forward, values, shape, row)


def _by_document(
    documents: Documents, forward: Callable[..., Any], values: list[Any], shape: pytree.TreeSpec, row: torch.Size
) -> Any:
    assert documents.back is not None and row.numel() == documents.back.numel(), (row, documents.back)
    found = []
    for batch in documents.batches:
        own = [each.flatten(0, 1)[batch] if _is_of(row, each) else each for each in values]
        args, kwargs = pytree.tree_unflatten(own, shape)
        found.append(forward(*args, **kwargs))
    return _together(found, documents, row)


def _with_borders(
    documents: Documents, forward: Callable[..., Any], values: list[Any], shape: pytree.TreeSpec, row: torch.Size
) -> Any:
    flat = [each.flatten(0, 1)[None] if _is_of(row, each) else each for each in values]
    args, kwargs = pytree.tree_unflatten(flat, shape)
    result = forward(*args, **kwargs, **documents.borders)
    return pytree.tree_map_only(torch.Tensor, lambda each: each.reshape(*row, *each.shape[2:]), result)


def _arguments(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec, torch.Size]:
    """Return a mixer's arguments without what describes the row, and rows and tokens of its hidden states."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_THE_ROW}
    values, shape = pytree.tree_flatten((args, kwargs))
    return values, shape, next(each.shape[:2] for each in values if isinstance(each, torch.Tensor))


def _is_of(row: torch.Size, value: Any) -> bool:
    """Return whether a value has something for each token."""
    return isinstance(value, torch.Tensor) and value.shape[:2] == row


def _together(found: list[Any], documents: Documents, row: torch.Size) -> Any:
    """Return the results of all calls as one, in the order of the row."""
    values: list[torch.Tensor | None] = []
    for calls in zip(*(pytree.tree_leaves(each) for each in found), strict=True):
        if all(each is None for each in calls):  # weights of attention that nobody asked for
            values.append(None)
        elif all(_is_of(batch.shape, each) for each, batch in zip(calls, documents.batches, strict=True)):
            whole = torch.cat([each.flatten(0, 1) for each in calls])[documents.back]
            values.append(whole.view(*row, *whole.shape[1:]))
        else:
            raise Unfit("what its state mixers return is not a tensor for each token")
    return pytree.tree_unflatten(values, pytree.tree_structure(found[0]))
