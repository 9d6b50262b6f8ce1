"""Compute losses from hidden states without the logits of a whole micro-batch.

Logits are the largest tensor of a step: 8,192 tokens of a vocabulary of 128,256 are 4 GiB in fp32, held together with
their softmax and their gradient. Here a few hundred tokens at a time become logits, losses and at once gradients; only
losses and gradients are kept. On one CPU thread, 2,048 tokens of that vocabulary take 0.26 times the logits' memory
besides the gradients, in 0.92 of the time of the plain loss, which takes 2.76 times the logits' memory
(docs/results.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.batch import Targets, Taught
from raytune_fsdp.model.added_rows import HeadWithRows, name_in, with_rows
from raytune_fsdp.model.objective.losses import Losses
from raytune_fsdp.model.objective.objective import CROSS_ENTROPY, Objective, losses_and_gradients
from raytune_fsdp.model.objective.own_loss import Bent
from raytune_fsdp.model.pieces.sums import local_weight, summed
from raytune_fsdp.model.pieces.vocabulary import VocabularyPart

if TYPE_CHECKING:
    from raytune_fsdp.model.objective.distillation import Lesson

_CHUNK = {"cpu": 2**25, "cuda": 2**27}
"""Logits at a time: 128 MiB in fp32, and products large enough for matrix units (261 tokens of 128,256). A GPU takes
four times as many: after each chunk the whole gradient of the weight is read and written, which for 261 tokens would
take about twice as long as their products; both are estimates for an H100 (3.3 TB/s, 800 TFLOP/s), not measured."""

_ROWS = 1024
"""Rows of a gradient in 16 bits that are scaled at a time: 64 MiB in fp32, if a token has 16,384 numbers."""

WIDE = "wide"
"""The name, in records and checkpoints, of gradients in 16 bits that are scaled by a factor in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a network does to its logits after the product with the output embedding."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> Shape:
        """Read it from the fields of a config. What configs do not say shows when the losses are compared."""
        text = hf_config.get_text_config()
        scale = 1.0
        for name, divides in (("logits_scaling", True), ("logit_scale", False), ("lm_head_multiplier", False)):
            value = getattr(text, name, None)
            if isinstance(value, int | float) and value:
                scale *= 1 / value if divides else value
        cap = getattr(text, "final_logit_softcapping", None)
        return cls(scale=scale, softcap=cap if isinstance(cap, int | float) and cap else None)


Ask = Callable[[torch.Tensor, VocabularyPart | None], Taught]
"""Is given the logits of some tokens, of this rank's part of the vocabulary, to do with as it likes."""


class NewRows(NamedTuple):
    """Rows of a head that are trained in place of rows of its frozen weight."""

    weight: torch.Tensor
    ids: torch.Tensor


class Aimed(nn.Module):
    """An output embedding that computes losses if it has targets."""

    _targets: Targets | None = None
    _objective: Objective = CROSS_ENTROPY
    losses: Losses | None = None

    @contextmanager
    def aimed_at(self, targets: Targets, objective: Objective = CROSS_ENTROPY) -> Iterator[None]:
        """Set the targets: in this context a forward pass of the network sets `losses`, and has no logits."""
        self._targets, self._objective, self.losses = targets, objective, None
        try:
            yield
        finally:
            self._targets = None

    def _in_place_of_logits(self, losses: Losses) -> torch.Tensor:
        """Keep the losses. Return one number, for the network to cap and scale as it likes.

        Gradients must come back through it, since FSDP gathers weights for backward when they reach what a module has
        returned.
        """
        output = losses.total[None, None, None].clone()  # FSDP warns of views
        self.losses = replace(losses, total=output.sum())
        return output


class LossHead(Aimed, HeadWithRows):
    """An output embedding that computes losses directly if it has targets; otherwise it returns logits.

    The product is computed in this module's own forward pass, because only then FSDP has gathered the weight.
    """

    shape: Shape
    _asked: tuple[torch.Tensor, Ask, list[Taught]] | None = None
    stands_for: str | None = None
    """The type of device whose chunk size is used; None: that of the device that computes."""
    vocabulary: VocabularyPart | None = None
    """This rank's part of the vocabulary. None: all of it."""
    wide: bool = False
    """Whether gradients are scaled by the factor as it is, not by one that was rounded to their 16 bits, which would be
    off by as much for the whole network, in one direction, and otherwise for each number of targets."""

    @classmethod
    def of(cls, linear: nn.Linear, shape: Shape) -> LossHead:
        """Return a loss head with the parameters of `linear`, tied or not."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias, head.shape = linear.weight, linear.bias, shape
        if isinstance(linear, HeadWithRows):
            head.added_rows, head.ids = linear.added_rows, linear.ids
        return head.train(linear.training)

    @contextmanager
    def asked(self, places: torch.Tensor, ask: Ask) -> Iterator[list[Taught]]:
        """In this context a forward pass of the network, which has no logits, puts what `ask` says of those in these
        places into this list, some tokens at a time."""
        found: list[Taught] = []
        self._asked = (places, ask, found)
        try:
            yield found
        finally:
            self._asked = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = local_weight(self.weight), None if self.bias is None else local_weight(self.bias)
        rows = NewRows(weight=self.added_rows, ids=self.places) if self.added_rows is not None else None
        if self._asked is not None:
            return self._answer(*self._asked, hidden, weight, bias, rows)
        if self._targets is None:
            if self.vocabulary is not None:
                return self.vocabulary.gathered(F.linear(hidden, weight, bias))
            return super().forward(hidden)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._targets.places)
        compute = partial(
            linear_cross_entropy, chosen, weight, bias, self._targets.ids, self.shape, self._objective, rows,
            device_type=self.stands_for, vocabulary=self.vocabulary, wide=self.wide,
        )  # fmt: skip
        bent = lesson = None
        if self._objective.bends is not None:
            with torch.no_grad():
                plain = compute().each
            bent = self._objective.bends.bend(-plain, self._targets)
        if self._objective.distillation is not None:
            lesson = self._objective.distillation.lesson(self._targets, hidden.new_empty(0, dtype=_wide(hidden)))
        return self._in_place_of_logits(compute(bent=bent, lesson=lesson))

    def _answer(
        self,
        places: torch.Tensor,
        ask: Ask,
        found: list[Taught],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: NewRows | None,
    ) -> torch.Tensor:
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
        own, ids = (None, None) if rows is None else rows
        for some in torch.split(chosen, tokens_at_once(hidden.device.type, _width(weight, self.vocabulary))):
            if len(some):
                logits, _ = _logits(some, weight, bias, own, ids, self.shape, _wide(hidden))
                found.append(ask(logits, self.vocabulary))
        return hidden.new_zeros(1, 1, 1)


def install_chunked_loss(model: PreTrainedModel) -> None:
    """Replace the network's output embedding, which must be an `nn.Linear`, with a `LossHead`."""
    old = model.get_output_embeddings()
    model.set_submodule(name_in(model, old), LossHead.of(old, Shape.of(model.config)))


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the network ends in one linear layer."""
    return type(model.get_output_embeddings()) is nn.Linear


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    shape: Shape,
    objective: Objective = CROSS_ENTROPY,
    rows: NewRows | None = None,
    *,
    device_type: str | None = None,
    vocabulary: VocabularyPart | None = None,
    bent: Bent | None = None,
    lesson: Lesson | None = None,
    wide: bool = False,
) -> Losses:
    """Compute the losses of the targets `ids`, each predicted from its row of `hidden` (tokens, width).

    `bent`: their losses, known already, and the derivatives of these by the log-probabilities. `lesson`: what a teacher
    predicts for them, which is to be learned. `wide` as in `LossHead`.
    """
    at_once = tokens_at_once(device_type or hidden.device.type, _width(weight, vocabulary))
    # Asked here, since gradients are always off inside of a Function.
    learning = torch.is_grad_enabled()
    total, each, right = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, None if rows is None else rows.weight, None if rows is None else rows.ids,
        ids, shape, objective, learning, at_once, vocabulary, bent, lesson, wide,
    )  # fmt: skip
    groups = None if bent is None else bent.recorded
    if lesson is not None:
        groups = lesson.recorded(each, right)
    return Losses(total=total, each=each, right=right, groups=groups)


def tokens_at_once(device_type: str, width: int) -> int:
    """Return of how many tokens such a device computes the logits at a time, if each has this many."""
    return max(1, _CHUNK.get(device_type, _CHUNK["cpu"]) // width)


def _width(weight: torch.Tensor, vocabulary: VocabularyPart | None) -> int:
    """Return how many logits a token has on the rank with the most. All ranks need chunks of the same size: the tensors
    that they exchange for a chunk have its length."""
    return weight.shape[0] if vocabulary is None else vocabulary.most


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradient of the sum in the forward pass, chunk by chunk; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: torch.Tensor | None,
        places: torch.Tensor | None,
        ids: torch.Tensor,
        shape: Shape,
        objective: Objective,
        learning: bool,
        at_once: int,
        vocabulary: VocabularyPart | None,
        bent: Bent | None,
        lesson: Lesson | None,
        scaled_wide: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = _wide(hidden)
        each = torch.empty(len(ids), dtype=wide, device=hidden.device)
        right = torch.empty(len(ids), dtype=torch.bool, device=hidden.device)
        # Torch says that a parameter needs its gradient even under no_grad.
        wanted = [learning and needed for needed in ctx.needs_input_grad]
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        # In fp32 even for 16-bit weights: here chunks are summed, which a single product would sum in its accumulators.
        of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        of_rows = torch.zeros_like(rows, dtype=wide) if rows is not None and wanted[3] else None
        for start in range(0, len(ids), at_once):
            part = slice(start, start + at_once)
            logits, slope = _logits(hidden[part], weight, bias, rows, places, shape, wide)
            if lesson is None:
                each[part], right[part] = losses_and_gradients(logits, ids[part], objective, vocabulary)
            else:
                each[part], right[part] = lesson.losses_and_gradients(logits, part, vocabulary)
            _bend(each, logits, bent, part)
            if of_hidden is None and of_weight is None and of_rows is None:
                continue
            if slope is not None:
                logits.mul_(slope)
            gradient = (logits.mul_(shape.scale) if shape.scale != 1.0 else logits).to(weight.dtype)
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=wide)
            apart = None if places is None else _taken_out(gradient, places)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
            if of_weight is not None:
                _add_product(of_weight, gradient, hidden[part])
            if rows is not None and apart is not None:
                if of_hidden is not None:
                    of_hidden[part].addmm_(apart, rows)
                if of_rows is not None:
                    _add_product(of_rows, apart, hidden[part])
        if of_hidden is not None and vocabulary is not None:
            of_hidden = summed(vocabulary.group, of_hidden)
        ctx.gradients = (of_hidden, of_weight, of_bias, of_rows)
        ctx.dtype, ctx.wide = weight.dtype, scaled_wide
        ctx.mark_non_differentiable(each, right)
        return each.sum() if bent is None or bent.total is None else bent.total.clone(), each, right

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = _scaled_wide if ctx.wide else _scaled
        scaled = [None if g is None else scale(g, factor).to(ctx.dtype) for g in ctx.gradients]
        del ctx.gradients  # scaled in place: a second backward would be wrong, and finds nothing
        return (*scaled, *[None] * 10)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return gradient.mul_(factor.to(gradient.dtype))


def _scaled_wide(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor)
    # A GPU rounds the factor to the type of what it multiplies, so that is made wider, some rows at a time.
    for some in torch.split(gradient, _ROWS):
        some.copy_(some.to(factor.dtype).mul_(factor))
    return gradient


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    places: torch.Tensor | None,
    shape: Shape,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits as the network makes them, and the slope of the cap on them."""
    logits = F.linear(hidden, weight, bias)
    if rows is not None and places is not None:
        with_rows(logits, hidden, rows, bias, places)
    logits = logits.to(wide)
    if shape.scale != 1.0:
        logits.mul_(shape.scale)
    if shape.softcap is None:
        return logits, None
    bent = logits.div_(shape.softcap).tanh_()
    slope = 1 - bent.square()
    return bent.mul_(shape.softcap), slope


def _bend(each: torch.Tensor, gradient: torch.Tensor, bent: Bent | None, part: slice) -> None:
    """Put other values in the place of cross-entropies, which are minus the log-probabilities, and their gradient."""
    if bent is not None:
        each[part] = bent.values[part]
        gradient.mul_(-bent.slopes[part, None])


def _taken_out(gradient: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Take these columns out and set them to zero: the weight's rows in their places were not used."""
    apart = gradient.index_select(1, places)
    gradient.index_fill_(1, places, 0)
    return apart


def _add_product(sum_: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    if sum_.dtype == gradient.dtype:
        sum_.addmm_(gradient.t(), hidden)
    else:
        sum_ += gradient.t() @ hidden
