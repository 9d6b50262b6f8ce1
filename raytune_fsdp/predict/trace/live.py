"""Follow the bytes that are alive while operations run, and what they are, on fake tensors and on real ones."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.predict.trace.work import Operation, name_of, tensors_in, work_of
from raytune_fsdp.step.units import fsdp_groups_of

Kind = Literal["weights", "gradients", "optimizer", "gathered", "activations", "host"]
"""`gathered`: weights of other ranks that a unit computes with, gradients on their way there, and buffers of both.
`activations`: everything else. `host`: what a GPU would have sent to the memory of its host."""

Bytes = Mapping[Kind, int]

_MOVES = ("c10d", "fsdp")
"""The namespaces of collectives, and of what copies into and out of their buffers."""


_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(slots=True)
class _Storage:
    """Memory that tensors share."""

    ref: weakref.ref[torch.UntypedStorage]
    size: int


@dataclass(frozen=True, slots=True)
class _Change:
    """Memory was taken, given back, or made larger."""

    storage: int
    by: int


class PhaseStart(NamedTuple):
    name: str
    changes: int
    """How many changes came before it."""
    operations: int


@dataclass(slots=True)
class Timeline:
    """All changes in the order in which they came, and marks between them."""

    changes: list[_Change] = field(default_factory=list)
    marks: list[PhaseStart] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    """The kind of each storage, as far as it is known."""

    def kind(self, storage: int) -> Kind:
        return self.kinds.get(storage, "activations")


_FLASH_BACKWARD = ("_varlen_attn_backward", "varlen_attention_with_sinks_backward")
_PADDED = 128
"""Rows by which FlashAttention 2 pads each document."""


class TookTooLong(RaytuneError):
    """A step was not followed to its end in the time that was given."""


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what operations make, from when it is made to when nothing holds it.

    FSDP gives the memory of gathered weights back, and takes it again, without an operation: their storages are asked
    for their size after each one.
    """

    def __init__(
        self,
        *,
        copies_to_reduce: bool = False,
        copies_to_promote: bool = False,
        longest: int = 0,
        documents: int = 0,
        until: float | None = None,
    ) -> None:
        """`copies_to_reduce`: collectives that sum copy what they are given, as gloo's do. `copies_to_promote`:
        operations on tensors of several types first copy some to the type they compute in, as those of CPUs do.
        `longest`: tokens of a document, for the work of attention; `documents`: how many of them a micro-batch has, for
        what flash kernels keep of each in backward. `until`: the time (time.monotonic()) at which
        TookTooLong is raised."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self._storages: dict[int, _Storage] = {}
        self._numbers = WeakIdKeyDictionary()
        self._resized: list[int] = []
        self._groups: list[Any] = []
        self._copies_to_reduce, self._copies_to_promote = copies_to_reduce, copies_to_promote
        self._longest, self._documents, self._until = longest, documents, until
        self._narrowed_from: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor, numbers with their scale: it will call operations on what it holds
        if func.is_view or func.namespace == "prim":  # half of all: no memory is taken, nothing is computed
            return func(*args, **(kwargs or {}))
        if self._until is not None and time.monotonic() > self._until:
            raise TookTooLong("its step has too many operations to be followed in the time that there is")
        self._look_at_resized()
        moves = func.namespace in _MOVES
        if moves and self._copies_to_reduce and "reduce" in func.__name__:
            # A reduce-scatter sums its second argument, an all-reduce its first.
            self._pass_by(
                sum(each.nbytes for each in tensors_in(args[1] if "reduce_scatter" in func.__name__ else args[0])),
                "gathered",
            )
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._see(tensor, moves=moves)
        if name_of(func) in _FLASH_BACKWARD:
            self._pass_by(_kept_by_flash(args, self._documents), "activations")
        if self._copies_to_promote and torch.Tag.pointwise in func.tags:
            self._pass_by(_promoted(args), "activations")
        if moves:
            for tensor in tensors_in((args, kwargs)):
                self._see(tensor, moves=True)
            if func.namespace == "c10d" and ("gather" in func.__name__ or "reduce" in func.__name__):
                self.timeline.operations.append(Operation("collective", 0.0, 0, 0))
        elif operation := work_of(func, args, kwargs or {}, result, self._longest):
            self.timeline.operations.append(operation)
            self._look_at_narrowed(func, result)
        return result

    def _look_at_narrowed(self, func: Any, result: Any) -> None:
        """Mark the operations that lead to 8 bits as such. torchao begins with absolute values."""
        operations = self.timeline.operations
        if func is torch.ops.aten.abs.default:
            self._narrowed_from = len(operations) - 1
        elif self._narrowed_from is not None and isinstance(result, torch.Tensor) and result.dtype in _EIGHT_BITS:
            found = operations[self._narrowed_from :]
            operations[self._narrowed_from :] = [each._replace(sort="narrowing") for each in found]
            self._narrowed_from = None

    def mark(self, name: str) -> None:
        self._look_at_resized()
        self.timeline.marks.append(PhaseStart(name, len(self.timeline.changes), len(self.timeline.operations)))

    def name(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Say what these are, or were. The last word counts."""
        for tensor in tensors:
            self.timeline.kinds[self._see(tensor)] = kind

    def follow_gathered(self, model: nn.Module) -> None:
        """Look for the memory that gathered weights come into, which FSDP keeps between passes without bytes."""
        self._groups = fsdp_groups_of(model)

    @contextmanager
    def sending_to_host(self) -> Iterator[None]:
        """Count what is first written in here as memory of the host."""
        with _Destinations(self):
            yield

    def _see(self, tensor: torch.Tensor, *, moves: bool = False) -> int:
        storage = tensor.untyped_storage()
        number: int | None = self._numbers.get(storage)  # type: ignore[no-untyped-call]
        if number is None:
            number = len(self._storages)
            self._numbers[storage] = number
            self._storages[number] = _Storage(ref=weakref.ref(storage, lambda _: self._resize(number, 0)), size=0)
            self._resize(number, storage.nbytes())
        if moves and number not in self.timeline.kinds:
            self.timeline.kinds[number] = "gathered"
        return number

    def _resize(self, number: int, size: int) -> None:
        each = self._storages[number]
        if size != each.size:
            self.timeline.changes.append(_Change(number, size - each.size))
            each.size = size

    def _look_at_resized(self) -> None:
        for group in [*self._groups]:  # made one after the other, when they are first gathered
            made = [getattr(each, "all_gather_outputs", ()) for each in group.fsdp_params]
            if all(made):
                self._groups.remove(group)
                self._resized += [self._see(tensor, moves=True) for tensors in made for tensor in tensors]
        for number in self._resized:
            storage = self._storages[number].ref()
            if storage is not None:
                self._resize(number, storage.nbytes())

    def _pass_by(self, size: int, kind: Kind) -> None:
        """Count memory that an operation has only while it runs."""
        number = len(self._storages)
        gone: Any = lambda: None  # noqa: E731
        self._storages[number] = _Storage(ref=gone, size=0)
        self.timeline.kinds[number] = kind
        self._resize(number, size)
        self._resize(number, 0)


class _Destinations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is copied into as memory of the host."""

    def __init__(self, live: MemoryTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._live.name([args[0]], "host")
        return func(*args, **(kwargs or {}))


def _kept_by_flash(args: Sequence[Any], documents: int) -> int:
    """Return the bytes that FlashAttention 2 has in backward besides its results, by its source.

    Gradients of queries, and a sum for each, are added up in fp32 in rows of which each document has 128 more than
    tokens. Gradients of keys and values are first kept for each head of the queries.
    """
    queries, keys = [each for each in args if isinstance(each, torch.Tensor) and each.ndim == 3][1:3]
    (tokens, heads, width), rounded = queries.shape, -(-queries.shape[2] // 32) * 32
    expanded = 2 * tokens * heads * width * queries.itemsize if keys.shape[1] != heads else 0
    return int((tokens + _PADDED * documents) * heads * (rounded + 1) * 4 + expanded)


def _promoted(args: Sequence[Any]) -> int:
    """Return the bytes of copies of tensors in the type that they all have in common."""
    tensors = [each for each in args if isinstance(each, torch.Tensor) and each.ndim]
    if len({each.dtype for each in tensors if each.dtype != torch.bool}) < 2:
        return 0
    width = reduce(torch.promote_types, (each.dtype for each in tensors)).itemsize
    return sum(each.numel() * width for each in tensors if each.dtype != torch.bool and each.itemsize != width)


def add(one: Bytes, other: Bytes, times: int = 1) -> Bytes:
    found = Counter(one)
    for kind, size in other.items():
        found[kind] += times * size
    return found
