"""Learning a teacher's predictions: how far the student's are from them; and what a network predicts.

Of each target the teacher has kept the probabilities of its k most likely tokens, and what all others have together.
To both divergences these others are one outcome, whose probability by the student is the sum of theirs, and not what
the k leave of 1. With all of the vocabulary kept, the divergences are exact. Otherwise they are lower bounds: what the
forward one lacks is p_rest times the divergence among the others, and its gradient by the logits of a target is off by
at most 2 p_rest, summed without signs.

The loss of a target is `temperature^2 (forward KL(p, q) + reverse KL(q, p)) + cross_entropy nll`, with p and q at that
temperature and nll at 1. With z the logits over the temperature and P the sum of p, which is 1 but for rounding:

    d forward / dz_m = P q_m - p_m
    d reverse / dz_m = q_m (log(q_m / p_m) - KL(q, p))

where m is a kept token, or the others together, of whose slope each gets its share, q_i / q_rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import MicroBatch, Targets, Taught
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.objectives import DistillObjective
from raytune_fsdp.model.attention.choose import inputs_of, logits_of
from raytune_fsdp.model.objective.chunked_head import LossHead, tokens_at_once
from raytune_fsdp.model.objective.losses import Losses, Recorded
from raytune_fsdp.model.objective.objective import CROSS_ENTROPY, losses_and_gradients
from raytune_fsdp.model.pieces.sums import summed
from raytune_fsdp.model.pieces.vocabulary import VocabularyPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """What a run learns of its teacher's predictions, by these weights."""

    forward: float = 1.0
    reverse: float = 0.0
    cross_entropy: float = 0.0
    temperature: float = 1.0

    @classmethod
    def of(cls, config: FinetuneConfig) -> Distillation | None:
        """Return what a config asks for; None: nothing is learned from a teacher."""
        objective = config.train.objective
        if not isinstance(objective, DistillObjective) or config.teacher is None:
            return None
        return cls(
            forward=objective.forward, reverse=objective.reverse, cross_entropy=objective.cross_entropy,
            temperature=config.teacher.temperature,
        )  # fmt: skip

    def lesson(self, targets: Targets, like: torch.Tensor) -> Lesson:
        """Return what is learned of a micro-batch. `like`: a tensor of the type in which losses are computed."""
        if targets.teacher is None and len(targets.ids):
            raise RuntimeError(f"the teacher's predictions of {len(targets.ids)} targets are not there")
        kinds = sum(bool(weight) for weight in (self.forward, self.reverse)) + 1
        return Lesson(self, targets, like.new_empty(kinds, len(targets.ids)))


class Lesson:
    """The teacher's predictions of a micro-batch, and what is found of its divergences and of its cross-entropies."""

    def __init__(self, distillation: Distillation, targets: Targets, found: torch.Tensor) -> None:
        self._what, self._targets = distillation, targets
        self._found = found
        """[divergences with a weight, and cross-entropies, targets]."""

    def losses_and_gradients(
        self, logits: torch.Tensor, part: slice, vocabulary: VocabularyPart | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of some of the targets, and whether the most likely token is right. Leave the gradient of
        the losses' sum in `logits`."""
        what, ids, taught = self._what, self._targets.ids[part], _part_of(self._targets, part, logits.dtype)
        hot = what.temperature != 1
        other = nll = right = None
        if hot:  # the cross-entropy is of other probabilities
            other = logits.clone()
            nll, right = losses_and_gradients(other, ids, CROSS_ENTROPY, vocabulary)
            logits.div_(what.temperature)
        split = _split(logits, taught.ids, ids, vocabulary)
        log_q, log_rest = split.log_probabilities()
        slopes, share = torch.zeros_like(log_q), torch.zeros_like(log_rest)
        divergences = []
        for weight, diverge in ((what.forward, _forward), (what.reverse, _reverse)):
            if weight:
                found = diverge(taught, log_q, log_rest)
                divergences.append(found.value)
                slopes.add_(found.slopes, alpha=weight * what.temperature)
                share.add_(found.share, alpha=weight * what.temperature)
        if nll is None or right is None:
            nll, right = split.log_sum - split.target, split.best == ids
            slopes.add_(log_q.exp(), alpha=what.cross_entropy)
            share.add_(log_rest.exp(), alpha=what.cross_entropy)
        split.fill(logits, slopes, share)
        if what.cross_entropy and other is not None:
            logits.add_(other, alpha=what.cross_entropy)
        elif what.cross_entropy:
            split.take_from_target(logits, what.cross_entropy)
        self._found[:, part] = torch.stack([*divergences, nll])
        return self._loss(divergences, nll), right

    def losses(self, logits: torch.Tensor, log_probabilities: torch.Tensor, right: torch.Tensor) -> Losses:
        """Return the losses of a micro-batch from all of its logits, where torch finds the gradient.

        `log_probabilities`: of these logits, one place after the other. `right`: by target.
        """
        places, what = self._targets.places, self._what
        nll = -log_probabilities[places, self._targets.ids]
        taught = _part_of(self._targets, slice(None), nll.dtype)
        scaled = logits.reshape(log_probabilities.shape)[places].to(nll.dtype) / what.temperature
        log_sum = scaled.logsumexp(-1)
        # Not gather, whose gradient a GPU adds up in any order.
        log_q = scaled[torch.arange(len(scaled), device=scaled.device)[:, None], taught.ids] - log_sum[:, None]
        log_rest = torch.full_like(log_sum, -torch.inf)
        if taught.ids.shape[1] < scaled.shape[1]:
            log_rest = scaled.scatter(-1, taught.ids, -torch.inf).logsumexp(-1) - log_sum
        weighted = ((what.forward, _forward), (what.reverse, _reverse))
        divergences = [diverge(taught, log_q, log_rest).value for weight, diverge in weighted if weight]
        self._found[:] = torch.stack([each.detach() for each in (*divergences, nll)])
        each = self._loss(divergences, nll)
        fixed = each.detach()
        return Losses(total=each.sum(), each=fixed, right=right, groups=self.recorded(fixed, right))

    def _loss(self, divergences: list[torch.Tensor], nll: torch.Tensor) -> torch.Tensor:
        what = self._what
        weights = [weight * what.temperature**2 for weight in (what.forward, what.reverse) if weight]
        found = sum(weight * each for weight, each in zip(weights, divergences, strict=True))
        return found + what.cross_entropy * nll if what.cross_entropy else torch.as_tensor(found)

    def recorded(self, each: torch.Tensor, right: torch.Tensor) -> Recorded:
        """Return what a step records, in the order of `figures.taught_values`, after losses and right choices."""
        figures = torch.cat([each.double()[None], right.double()[None], self._found.double()])
        return Recorded(figures, self._targets.datasets)


def _part_of(targets: Targets, part: slice, dtype: torch.dtype) -> Taught:
    """Return what the teacher predicts for some of the targets, as it is computed with."""
    taught = targets.teacher
    if taught is None:  # a filler
        none = targets.ids.new_empty(0, 1)
        return Taught(ids=none, log_probabilities=none.to(dtype), rest=none[:, 0].to(dtype))
    return Taught(
        ids=taught.ids[part].long(), log_probabilities=taught.log_probabilities[part].to(dtype),
        rest=taught.rest[part].to(dtype),
    )  # fmt: skip


class _Divergence(NamedTuple):
    value: torch.Tensor
    """[targets]."""
    slopes: torch.Tensor
    """[targets, k]: its derivative by the logits of kept tokens, divided by the temperature."""
    share: torch.Tensor
    """[targets]: that by the logits of all others together."""


def _forward(taught: Taught, log_q: torch.Tensor, log_rest: torch.Tensor) -> _Divergence:
    p, p_rest = taught.log_probabilities.exp(), taught.rest.exp()
    apart, rest_apart = _where(p, taught.log_probabilities - log_q), _where(p_rest, taught.rest - log_rest)
    every = p.sum(-1) + p_rest  # 1 but for rounding; so the slopes are those of the value
    return _Divergence(
        (p * apart).sum(-1) + p_rest * rest_apart, log_q.exp() * every[:, None] - p, log_rest.exp() * every - p_rest
    )


def _reverse(taught: Taught, log_q: torch.Tensor, log_rest: torch.Tensor) -> _Divergence:
    q, q_rest = log_q.exp(), log_rest.exp()
    apart, rest_apart = _where(q, log_q - taught.log_probabilities), _where(q_rest, log_rest - taught.rest)
    value = (q * apart).sum(-1) + q_rest * rest_apart
    return _Divergence(value, q * (apart - value[:, None]), q_rest * (rest_apart - value))


def _where(probability: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return 0 for what is impossible, or so improbable that it adds nothing: there, the values may be infinite."""
    return torch.where(probability > 0, values, 0)


class _Split(NamedTuple):
    """Logits, split into those of kept tokens and the others, of which the exponentials are left."""

    kept: torch.Tensor
    """[targets, k]: of all ranks."""
    target: torch.Tensor
    """[targets]: the logit of the target."""
    rest: torch.Tensor
    """[targets]: the logarithm of the sum of the others' exponentials; minus infinity if there are none."""
    sums: torch.Tensor
    """[targets]: the sum of what is left in their places, of all ranks."""
    best: torch.Tensor
    """[targets]: the most likely token of all, the first of several."""
    places: torch.Tensor
    """[targets, k + 1]: where the kept tokens and the target are on this rank."""
    mine: torch.Tensor | None
    """Which of these this rank has; None: all."""

    @property
    def log_sum(self) -> torch.Tensor:
        return torch.logaddexp(self.rest, self.kept.logsumexp(-1))

    def log_probabilities(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of the kept tokens and of the others together."""
        log_sum = self.log_sum
        return self.kept - log_sum[:, None], self.rest - log_sum

    def fill(self, logits: torch.Tensor, slopes: torch.Tensor, share: torch.Tensor) -> None:
        """Put these values in the kept tokens' places, and give each other token its part of the others' share."""
        # The largest of the others is 1 in the sum; if there are none, nothing is divided.
        logits.mul_((share / self.sums.clamp(min=1))[:, None])
        _put(logits, self.places[:, :-1], None if self.mine is None else self.mine[:, :-1], slopes)

    def take_from_target(self, logits: torch.Tensor, taken: float) -> None:
        place = self.places[:, -1:]
        here = taken if self.mine is None else taken * self.mine[:, -1:].to(logits.dtype)
        logits.scatter_(-1, place, logits.gather(-1, place) - here)


def _split(
    logits: torch.Tensor, kept: torch.Tensor, targets: torch.Tensor, vocabulary: VocabularyPart | None
) -> _Split:
    """Split `logits`, where the exponentials of the others are left, over that of the largest of them."""
    every = torch.cat([kept, targets[:, None]], 1)
    places, mine = (every, None) if vocabulary is None else vocabulary.own(every)
    found = logits.gather(-1, places)
    nothing = torch.full_like(found[:, :-1], -torch.inf)
    _put(logits, places[:, :-1], None if mine is None else mine[:, :-1], nothing)
    most, at = logits.max(-1) if vocabulary is None else vocabulary.best(logits)
    above = torch.where(most == -torch.inf, 0, most)
    sums = logits.sub_(above[:, None]).exp_().sum(-1)
    if vocabulary is not None and mine is not None:
        both = summed(vocabulary.group, torch.cat([torch.where(mine, found, 0), sums[:, None]], 1))
        found, sums = both[:, :-1], both[:, -1]
    own = found[:, :-1]
    top = own.amax(-1)
    first = torch.where(own == top[:, None], kept, torch.iinfo(kept.dtype).max).amin(-1)
    best = torch.where(top > most, first, torch.where(top < most, at, torch.minimum(at, first)))
    return _Split(own, found[:, -1], sums.log() + above, sums, best, places, mine)


def _put(logits: torch.Tensor, places: torch.Tensor, mine: torch.Tensor | None, values: torch.Tensor) -> None:
    """Put values in these places of each row."""
    if mine is not None:
        # The place of other ranks' tokens is 0: all that is written there is the same, what it is to have or has.
        first = mine & (places == 0)
        kept = torch.where(first.any(-1), torch.where(first, values, 0).sum(-1), logits[:, 0])
        values = torch.where(mine, values, kept[:, None])
    logits.scatter_(-1, places, values)


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    top_k: int,
    temperature: float,
    dtype: torch.dtype,
    tokens: int | None = None,
) -> Taught:
    """Return what a network predicts for the targets of a micro-batch (of a part: for its own), as it stands.

    Of equally likely tokens those with lower ids come first, so that the same logits give the same bytes. `tokens`: how
    many tokens there are, where the network has more rows than its tokenizer has tokens: the others are impossible.
    Collective. Whoever calls this has turned dropout off.
    """
    head, places = model.get_output_embeddings(), batch.targets.places
    inputs = inputs_of(model, batch.input_ids, batch.position_ids, batch.borders)
    if isinstance(head, LossHead):
        whole = head.out_features if head.vocabulary is None else head.vocabulary.whole
        many = min(top_k, whole if tokens is None else min(tokens, whole))
        ask = partial(_most_likely, many=many, temperature=temperature, tokens=tokens)
        with head.asked(places, ask) as found:
            model(**inputs)
    else:
        logits = logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
        rows = logits.reshape(-1, logits.shape[-1])
        many = min(top_k, rows.shape[-1] if tokens is None else min(tokens, rows.shape[-1]))
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        ask = partial(_most_likely, many=many, temperature=temperature, tokens=tokens)
        some = torch.split(places, tokens_at_once(rows.device.type, rows.shape[-1]))
        found = [ask(rows.index_select(0, each).to(wide), None) for each in some if len(each)]
    return Taught(
        ids=torch.cat([places.new_empty(0, many, dtype=torch.int32), *(each.ids.int() for each in found)]),
        log_probabilities=torch.cat(
            [places.new_empty(0, many, dtype=dtype), *(each.log_probabilities.to(dtype) for each in found)]
        ),
        rest=torch.cat([places.new_empty(0, dtype=dtype), *(each.rest.to(dtype) for each in found)]),
    )


def _most_likely(
    logits: torch.Tensor, vocabulary: VocabularyPart | None, *, many: int, temperature: float, tokens: int | None
) -> Taught:
    """Return the tokens with the largest logits, which are changed, and the probabilities of these and of the rest."""
    first = 0 if vocabulary is None else vocabulary.first
    if tokens is not None:
        logits[:, max(0, tokens - first) :] = -torch.inf
    here = min(many, logits.shape[-1])
    values, ids = _largest(logits, here)
    if vocabulary is not None:
        missing = min(many, vocabulary.most) - here
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(ids + first, (0, missing), value=vocabulary.whole)
        # Ranks have tokens in the order of their ids: of equal values, the first one has the lowest id.
        ids = vocabulary.of_all(ids).gather(-1, _largest(vocabulary.of_all(values), many)[1])
    split = _split(logits.div_(temperature), ids, ids[:, 0], vocabulary)
    log_probabilities, rest = split.log_probabilities()
    return Taught(ids=ids, log_probabilities=log_probabilities, rest=rest)


def _largest(values: torch.Tensor, many: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row and their places, of equal ones the first: topk alone may take any."""
    least = values.topk(many, -1).values[:, -1:]
    # fp32 has whole numbers up to 2^24, more than any vocabulary has tokens.
    order = -torch.arange(values.shape[-1], device=values.device, dtype=values.dtype)
    key = torch.where(values > least, torch.inf, torch.where(values == least, order, -torch.inf))
    places = key.topk(many, -1).indices.sort(-1).values
    found, by = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return found, places.gather(-1, by)
