"""A loss of the user's own: a function of one document (`train.loss`).

It is given the logarithms of the probabilities of a document's targets and returns a value for each. Values are summed
and divided as cross-entropies are, so what is learned depends on neither packing nor ranks. Of each value the slope is
taken here, at detached numbers, document by document: the head then needs no more than that, and makes its logits a few
hundred tokens at a time as for any loss, once for the probabilities and once for the gradient (chunked_head.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from raytune_fsdp.base.batch import Targets
from raytune_fsdp.base.errors import ConfigError, RaytuneError, in_one_line
from raytune_fsdp.data.rows.own_code import OwnCode
from raytune_fsdp.data.sources.source import shorten
from raytune_fsdp.model.objective.losses import Recorded

KEY = "train.loss"

_TRIED = (1, 2, 7, 64)
"""The targets of the documents that a function is tried on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDocument:
    """What a loss of your own is told about a document, besides its log-probabilities."""

    targets: torch.Tensor
    """int64: the ids of the tokens that were to be predicted, one for each log-probability."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """The columns of its row that `train.loss_columns` names."""


class Bent(NamedTuple):
    """The values that take the place of the cross-entropies of targets."""

    values: torch.Tensor
    slopes: torch.Tensor
    """The derivative of the sum of a document's values by the log-probability of each of its targets."""
    total: torch.Tensor | None = None
    """What the slopes are those of; None: the sum of the values."""
    recorded: Recorded | None = None
    """What is recorded of groups."""


class Bends(Protocol):
    """What puts other values in the place of cross-entropies."""

    def bend(self, log_probabilities: torch.Tensor, targets: Targets, /) -> Bent:
        """Return the values of a micro-batch's targets, from their log-probabilities, which are not changed."""


def bent_sum(bends: Bends, log_probabilities: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Bent]:
    """Return the sum of the values of targets, through which gradients flow, and the values."""
    fixed = log_probabilities.detach()
    bent = bends.bend(fixed, targets)
    # It adds 0, whose gradient the slopes are; of a target that is impossible the difference would be no number.
    nothing = torch.where(fixed.isfinite(), log_probabilities - fixed, 0)
    return (bent.values.sum() if bent.total is None else bent.total) + (bent.slopes * nothing).sum(), bent


class OwnLoss:
    """The user's function, imported."""

    def __init__(self, own: OwnCode, columns: Sequence[str] = ()) -> None:
        """`columns`: what it is told of rows, by name."""
        self._own, self._columns = own, tuple(columns)
        self._function: Callable[[torch.Tensor, LossDocument], Any] = own.load()

    def bend(self, log_probabilities: torch.Tensor, targets: Targets) -> Bent:
        made, first = Bent(torch.empty_like(log_probabilities), torch.empty_like(log_probabilities)), 0
        for number, count in enumerate(targets.by_document):
            part, told = slice(first, first + count), targets.columns[number] if self._columns else ()
            found = self._one(log_probabilities[part], targets.ids[part].clone(), told)
            made.values[part], made.slopes[part] = found.values, found.slopes
            first += count
        assert first == len(log_probabilities), "a part of a micro-batch, whose documents others have the rest of"
        return made

    def _one(self, log_probabilities: torch.Tensor, ids: torch.Tensor, told: Sequence[float]) -> Bent:
        """Return the values of a document's targets and their slopes. Raise ConfigError for what is no such value."""
        document = LossDocument(targets=ids, columns=dict(zip(self._columns, told, strict=True)))
        given = log_probabilities.detach().clone().requires_grad_()
        with self._explained(len(given)), torch.enable_grad():
            made = self._function(given, document)
        if not isinstance(made, torch.Tensor) or made.shape != given.shape or made.dtype != given.dtype:
            found = f"{_kind(made)} of shape {list(made.shape)}" if isinstance(made, torch.Tensor) else shorten(made)
            raise ConfigError(
                f"{self._own.said}: for a document of {len(given)} target(s) it returned {found}; it must return "
                f"{_kind(given)} of shape {[len(given)]}: a value for each target, such as "
                "-log_probabilities"
            )
        slopes = None
        if made.requires_grad:
            with self._explained(len(given)):
                (slopes,) = torch.autograd.grad(made.sum(), given, allow_unused=True)
        return Bent(made.detach(), torch.zeros_like(made) if slopes is None else slopes)

    @contextmanager
    def _explained(self, count: int) -> Iterator[None]:
        try:
            yield
        except (RaytuneError, torch.OutOfMemoryError, torch.AcceleratorError):  # a device's are not the function's
            raise
        except Exception as error:  # the user's code runs here
            raise ConfigError(
                f"{self._own.said}: for a document of {count} target(s) it raised {in_one_line(error)}; it is called "
                "with a tensor of log-probabilities and a LossDocument, whose columns are those of train.loss_columns, "
                "and returns a value for each target"
            ) from error

    def prove(self, device: torch.device, dtype: torch.dtype) -> list[list[float]]:
        """Try it on documents of several lengths, of columns that suit it, and return all values and slopes.

        Raise ConfigError for what is no loss.
        """
        many = len(self._columns)
        try:
            return self._proven([1.0] * many, device, dtype)
        except ConfigError:
            if many:  # it may have a logarithm of a column, or the difference of two: with 1/2, 1/3 and so on
                with suppress(ConfigError):
                    return self._proven([1 / (place + 2) for place in range(many)], device, dtype)
            raise

    def _proven(self, told: Sequence[float], device: torch.device, dtype: torch.dtype) -> list[list[float]]:
        found = [self._tried(number, told, device, dtype) for number in range(len(_TRIED))]
        if not any(each.slopes.any() for each in found):
            raise ConfigError(
                f"{self._own.said}: none of its values depends on log_probabilities for torch, so nothing would be "
                "learned; compute with the tensor itself, without .item(), .detach(), numpy or torch.no_grad()"
            )
        return [row.tolist() for each in found for row in (each.values, each.slopes)]

    def _tried(self, number: int, told: Sequence[float], device: torch.device, dtype: torch.dtype) -> Bent:
        count = _TRIED[number]
        ids = torch.arange(count, device=device) * 31 % 97
        # From a certain target, whose log-probability rounds to 0, to an improbable one.
        given = 0 - ((torch.arange(count, device=device) * 37 + 11 * number) % 101).to(dtype) / 16
        made = self._one(given, ids, told)
        for what, values in (("value", made.values), ("gradient", made.slopes)):
            if not bool(values.isfinite().all()):
                place = int((~values.isfinite()).nonzero()[0, 0])
                raise ConfigError(
                    f"{self._own.said}: for a target with the log-probability {float(given[place]):g} its {what} is "
                    f"{float(values[place])}; keep it finite, such as by torch.clamp before a logarithm or a root"
                )
        return made


def _kind(tensor: torch.Tensor) -> str:
    return f"a tensor of {str(tensor.dtype).removeprefix('torch.')}"


def find_loss(name: str, columns: Sequence[str] = ()) -> OwnCode:
    """Return the function that `train.loss` names, with the hashes of its code. Raise ConfigError if it is no loss.

    It is tried here and in a fresh process, which differs in all that must not matter.
    """
    own = OwnCode(KEY, name).found
    here = OwnLoss(own, columns).prove(torch.device("cpu"), torch.float32)
    there = own.call_elsewhere([{"name": name, "columns": columns}], by=f"{__name__}:{call.__name__}")
    ((kind, result),) = there.results
    if kind == "raised":
        raise ConfigError(result[1])
    again = OwnLoss(own, columns).prove(torch.device("cpu"), torch.float32)
    if not here == again == pickle.loads(result):
        raise ConfigError(
            f"{own.said}: called twice for one document, it returned two different losses, so what is learned would "
            "depend on who computes it; make it depend on the document alone (no random numbers, no state between "
            "calls, no order of a set)"
        )
    return replace(own, modules=there.modules)


def load_code(
    codes: Sequence[OwnCode], columns: Sequence[str], device: torch.device, dtype: torch.dtype
) -> OwnLoss | None:
    """Return the run's own loss, if it has one, tried on the device of a rank that computes in this type.

    Refuse other code than the run was prepared with, also of its network.
    """
    for each in codes:
        each.load()
    own = next((each for each in codes if each.key == KEY), None)
    if own is None:
        return None
    loss = OwnLoss(own, columns)
    loss.prove(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return loss


def call(_: Callable[..., Any], row: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """Try a loss in another process, as `elsewhere` calls it."""
    try:
        return OwnLoss(OwnCode(KEY, row["name"]), row["columns"]).prove(torch.device("cpu"), torch.float32), None
    except Exception as error:
        return None, error


class StandIn:
    """Stands for any function where tensors have no values: what a function of a few numbers takes is not counted."""

    def bend(self, log_probabilities: torch.Tensor, targets: Targets) -> Bent:
        return Bent(-log_probabilities, -torch.ones_like(log_probabilities))
