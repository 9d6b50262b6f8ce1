"""Objectives of groups by the book: each document computed alone, plain formulas in fp64, gradients by torch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import log_softmax

from raytune_fsdp.base.batch import Cursor, PackedSample, Role
from raytune_fsdp.config import FinetuneConfig

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
    "kto weighted": {"type": "kto", "beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7},
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
        return torch.square(good - bad - group.margin / beta - 1 / (2 * beta))
    if kind == "orpo":
        odds = torch.log(good.exp() / (1 - good.exp())) - torch.log(bad.exp() / (1 - bad.exp()))
        loss: torch.Tensor = -beta * torch.log(1 / (1 + torch.exp(-(odds - group.margin))))
        return loss
    apart = beta * (good - bad) - group.margin - objective.get("gamma", 0.0)
    if objective.get("loss") == "hinge":
        return torch.clamp(1 - apart, min=0)
    right, wrong = (-torch.log(1 / (1 + torch.exp(-each))) for each in (apart, -apart))
    loss = (1 - smoothing) * right + smoothing * wrong
    if objective.get("loss") == "robust":
        loss = ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return loss


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


def preference_config(
    directory: Path,
    objective: Mapping[str, Any],
    *,
    names: Sequence[str] = ("rows",),
    architecture: Mapping[str, Any] | None = None,
    **sections: Any,
) -> FinetuneConfig:
    """A run of six steps on pairs or judged answers, in five micro-batches a step, with weights and margins.

    `names`: of its datasets.
    """
    from tests.runs import GPT2, make_config

    kind = "binary" if objective["type"] == "kto" else "preference"
    directory.mkdir(exist_ok=True)
    format = {"type": kind, "style": "plain", "weight": "weight"}
    format |= {"margin": "margin"} if kind == "preference" else {}
    datasets = []
    for seed, name in enumerate(names):
        path = directory / f"{kind}-{name}.jsonl"
        datasets.append({"path": str(path), "name": name, "format": format})
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in _rows(kind, seed)))
    data = {"train": datasets, "seq_len": 48, "window": 16, **sections.pop("data", {})}
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": 6, **sections.pop("train", {}), "objective": objective}
    return make_config(directory, architecture or GPT2, data=data, train=train, **sections)


def _rows(kind: str, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5 + seed)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{number}" for number in rng.integers(3, 64, int(rng.integers(least, most))))

    rows = []
    for _ in range(70):
        row: dict[str, Any] = {"prompt": words(2, 7), "weight": float(rng.integers(1, 5)) / 2}
        if kind == "preference":
            row |= {"chosen": f" {words(1, 9)}", "rejected": f" {words(1, 9)}", "margin": float(rng.integers(3)) / 4}
        else:
            row |= {"completion": f" {words(1, 9)}", "label": bool(rng.random() < 0.7)}
        rows.append(row)
    return rows


def plain_loop(values: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a loop in plain PyTorch: one document at a time, in one process."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.run.prepare import prepare

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare(config, 1)
    begun = assemble(config, prepared, standing, torch.device("cpu")).model
    model = AutoModelForCausalLM.from_config(prepared.hf_config, dtype=torch.float64)
    model.load_state_dict(begun.state_dict())
    reference = copy.deepcopy(model)
    dist.destroy_process_group()
    optim, steps, results = config.optim, config.train.max_steps or 0, []
    adamw = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0
    )
    samples = Stream(prepared.train, seed=config.run.seed).samples(Cursor())
    for _ in range(steps):
        groups = [
            each for _ in range(config.train.global_batch) for each in _groups_in(next(samples).sample, reference)
        ]
        loss = loss_of(model, groups, config.train.objective.model_dump())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm or math.inf)
        adamw.step()
        adamw.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


def _groups_in(sample: PackedSample, reference: Any) -> list[Group]:
    """The groups of a packed sample, from its arrays, and what the reference says of them."""
    assert sample.columns is not None
    starts = [*np.flatnonzero(sample.position_ids == 0).tolist(), len(sample.input_ids)]
    members = []
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        if sample.source_ids[start] < 0:  # padding
            continue
        ids, told = sample.input_ids[start:end].tolist(), sample.columns[:, start].tolist()
        role, weight, margin, skipped = int(told[0]), told[1], told[2], int(told[3])
        answer = int(np.flatnonzero(sample.labels[start:end] != -100)[0]) + skipped
        member = Member(ids, answer, skipped)
        with torch.no_grad():
            said = log_probabilities(reference, member)[0].sum().item()
        members.append((member._replace(reference=said), role, weight, margin))
    return [
        Group(first[0], second[0], first[1] != Role.UNDESIRABLE, first[2], first[3])
        for first, second in zip(members[::2], members[1::2], strict=True)
    ]
