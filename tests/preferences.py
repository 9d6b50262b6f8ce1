"""Objectives of groups by the book: each document computed alone, plain formulas in fp64, gradients by torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import log_softmax

PAIRS: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo", "beta": 0.3},
    "dpo smoothed": {"type": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    "dpo hinge": {"type": "dpo", "beta": 0.6, "loss": "hinge"},
    "dpo robust": {"type": "dpo", "beta": 0.3, "loss": "robust", "label_smoothing": 0.1},
    "dpo by length": {"type": "dpo", "beta": 2.0, "normalize": "length"},
    "dpo and sft": {"type": "dpo", "beta": 0.3, "sft": {"weight": 0.7}},
    "ipo": {"type": "ipo", "beta": 0.3},
    "simpo": {"type": "simpo", "beta": 2.0, "gamma": 0.5},
    "simpo smoothed": {"type": "simpo", "beta": 2.0, "gamma": 0.5, "label_smoothing": 0.1},
    "cpo": {"type": "cpo", "beta": 0.2},
    "cpo hinge": {"type": "cpo", "beta": 0.2, "loss": "hinge"},
    "orpo": {"type": "orpo", "beta": 0.4},
}
KTO: dict[str, dict[str, Any]] = {
    "kto": {"type": "kto", "beta": 0.2},
    "kto weighted": {"type": "kto", "beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.75},
}
COMPARING = ("dpo", "ipo", "kto")


class Member(NamedTuple):
    """A document of a group."""

    ids: Sequence[int]
    prompt: int
    """Tokens before the answer."""
    skipped: int = 0
    """Of its targets, how many come before the answer's."""
    reference: float = 0.0


class Group(NamedTuple):
    first: Member
    second: Member
    desirable: bool = True
    weight: float = 1.0
    margin: float = 0.0


def log_probabilities(model: Any, member: Member) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithms of the answer's probabilities, and of those of all targets."""
    ids = torch.tensor([list(member.ids)])
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits[0]
    every = log_softmax(logits[:-1].double(), -1).gather(1, ids[0, 1:, None])[:, 0]
    answer = every[max(1, member.prompt) - 1 :]
    return answer, every[max(1, member.prompt) - 1 - member.skipped :]


def loss_of(model: Any, groups: Sequence[Group], objective: Mapping[str, Any]) -> torch.Tensor:
    """The loss of a global batch."""
    kind, beta = objective["type"], objective["beta"]
    if kind == "kto":
        return _kto(model, groups, objective)
    losses, terms, tokens = [], [], 0
    for group in groups:
        chosen, whole = log_probabilities(model, group.first)
        rejected, _ = log_probabilities(model, group.second)
        losses.append(group.weight * _pair(objective, beta, group, chosen, rejected))
        terms.append(-group.weight * whole.sum())
        tokens += len(whole)
    default = {"cpo": 1.0, "orpo": 1.0}.get(kind, 0.0)
    weight = objective.get("sft", {}).get("weight", default)
    return torch.stack(losses).mean() + weight * torch.stack(terms).sum() / tokens


def _pair(
    objective: Mapping[str, Any], beta: float, group: Group, chosen: torch.Tensor, rejected: torch.Tensor
) -> torch.Tensor:
    kind, smoothing = objective["type"], objective.get("label_smoothing", 0.0)
    by_length = kind in ("ipo", "simpo", "orpo") or objective.get("normalize") == "length"
    sides = []
    for found, member in ((chosen, group.first), (rejected, group.second)):
        score = found.sum() - (member.reference if kind in COMPARING else 0.0)
        sides.append(score / len(found) if by_length else score)
    good, bad = sides
    if kind == "ipo":
        return (good - bad - group.margin / beta - 1 / (2 * beta)) ** 2
    if kind == "orpo":
        odds = torch.log(good.exp() / (1 - good.exp())) - torch.log(bad.exp() / (1 - bad.exp()))
        return -beta * torch.log(1 / (1 + torch.exp(-(odds - group.margin))))
    apart = beta * (good - bad) - group.margin - objective.get("gamma", 0.0)
    if objective.get("loss") == "hinge":
        return torch.clamp(1 - apart, min=0)
    right, wrong = (-torch.log(1 / (1 + torch.exp(-each))) for each in (apart, -apart))
    if objective.get("loss") == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def kl_of(model: Any, groups: Sequence[Group]) -> float:
    with torch.no_grad():
        gains = [log_probabilities(model, each.second)[0].sum() - each.second.reference for each in groups]
    return max(0.0, math.fsum(map(float, gains)) / len(groups))


def _kto(model: Any, groups: Sequence[Group], objective: Mapping[str, Any]) -> torch.Tensor:
    kl, losses = kl_of(model, groups), []
    for group in groups:
        gain = log_probabilities(model, group.first)[0].sum() - group.first.reference
        sign = 1 if group.desirable else -1
        weight = objective.get("desirable_weight" if group.desirable else "undesirable_weight", 1.0)
        losses.append(group.weight * weight * (1 - 1 / (1 + torch.exp(-objective["beta"] * sign * (gain - kl)))))
    return torch.stack(losses).mean()
