"""Losses of groups against formulas by the book, each document computed alone: values, gradients, figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from raytune_fsdp.base.batch import GROUP_COLUMNS, Cursor, MicroBatch, PackedSample, Role
from raytune_fsdp.config.sections.train import TrainConfig
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.figures import group_values
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.model.objective.judged import KINDS
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.plan.step_counts import GROUPS, TARGETS, TERM_TOKENS
from tests.models import VOCABULARY, build
from tests.preferences import COMPARING, KTO, PAIRS, Group, Member, kl_of, loss_of

LENGTH = 96


def groups_of(seed: int, count: int, *, whole: bool, judged: bool = False) -> list[Group]:
    """Groups of random answers; with `whole`, prompts of first members are targets, too."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(1, 6))).tolist()
        members = []
        for first in (True, False):
            answer = rng.integers(3, VOCABULARY, int(rng.integers(1, 9))).tolist()
            skipped = len(prompt) - 1 if whole and first else 0
            reference = float(-(4.9 + 0.5 * judged) * len(answer) + rng.normal() * 2)
            members.append(Member([*prompt, *answer], len(prompt), skipped, reference))
        good = bool(rng.integers(2)) if judged else True
        made.append(
            Group(
                members[0], members[1], good, float(rng.uniform(0.5, 2)), 0.0 if judged else float(rng.uniform(0, 0.5))
            )
        )
    return made


def packed(groups: Sequence[Group], *, compares: bool, judged: bool = False, dataset: int = 0) -> PackedSample:
    """One sample of groups."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    columns: list[list[float]] = []
    for group in groups:
        roles = (
            (Role.DESIRABLE if group.desirable else Role.UNDESIRABLE, Role.MISMATCHED)
            if judged
            else (Role.CHOSEN, Role.REJECTED)
        )
        for member, role in zip((group.first, group.second), roles, strict=True):
            begin = max(1, member.prompt) - member.skipped
            ids += member.ids
            labels += [-100] * begin + list(member.ids[begin:])
            positions += range(len(member.ids))
            row = [role, group.weight, group.margin, member.skipped, *([member.reference] if compares else [])]
            columns += [row] * len(member.ids)
    rest = LENGTH - len(ids)
    assert rest >= 0
    told = np.zeros((len(GROUP_COLUMNS) + compares, LENGTH))
    told[:, : len(columns)] = np.array(columns, dtype=np.float64).T
    return PackedSample(
        input_ids=np.array(ids + [0] * rest, np.int32),
        labels=np.array(labels + [-100] * rest, np.int32),
        position_ids=np.array([*positions, *range(rest)], np.int32),
        source_ids=np.array([dataset] * len(columns) + [-1] * rest, np.int32),
        id=1,
        columns=told,
    )


def objective_of(values: dict[str, Any]) -> GroupObjective:
    config = TrainConfig.model_validate({"global_batch": 4, "max_steps": 1, "objective": values})
    return GroupObjective.of(config.objective)


def counts_of(batches: Sequence[MicroBatch]) -> torch.Tensor:
    """What a step counts of them, as far as a loss asks."""
    from raytune_fsdp.plan.step_counts import _of_groups

    counts = torch.zeros(8, dtype=torch.int64)
    counts[TARGETS] = sum(each.target_tokens for each in batches)
    counts[GROUPS], counts[TERM_TOKENS] = _of_groups(batches)
    return counts


def made(values: dict[str, Any], *, seed: int = 0) -> tuple[list[Group], list[MicroBatch]]:
    """Seven groups in two micro-batches of two samples, the second of one: the same documents, packed."""
    kind = values["type"]
    groups = groups_of(seed, 7, whole=kind == "orpo", judged=kind == "kto")
    sections = groups[:3], groups[3:5], groups[5:]
    samples = [
        packed(each, compares=kind in COMPARING, judged=kind == "kto", dataset=number % 2)
        for number, each in enumerate(sections)
    ]
    return groups, [to_batch(samples[:2], index=0, after=Cursor()), to_batch(samples[2:], index=1, after=Cursor())]


@pytest.mark.parametrize("name", [*PAIRS, *KTO])
@pytest.mark.parametrize("head", ["plain", "chunked"])
def test_values_and_gradients_are_those_of_the_book(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", VOCABULARY * 5)  # in chunks that end inside of documents
    values = (PAIRS | KTO)[name]
    groups, batches = made(values)
    model = build("gpt2", attn_implementation="eager").double().eval()
    loss = loss_of(model, groups, values)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if head == "chunked":
        install_chunked_loss(model)

    def over_step(measure: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([measure(model, each) for each in batches]).sum()

    counts = counts_of(batches)
    objective = Objective(groups=objective_of(values)).of_step(counts, over_step)
    figures, total = torch.zeros(len(KINDS), dtype=torch.float64), 0.0
    for batch in batches:
        found = micro_batch_loss(model, batch, objective)
        (found.total / counts[TARGETS]).backward()  # type: ignore[no-untyped-call]
        assert found.groups is not None and not found.groups.figures.requires_grad
        figures += found.groups.figures.sum(1)
        total += found.total.item() / int(counts[TARGETS])
    assert total == pytest.approx(loss.item(), rel=1e-11)
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[key], rtol=1e-8, atol=1e-13), key
    config = TrainConfig.model_validate({"global_batch": 4, "max_steps": 1, "objective": values}).objective
    told = group_values(figures.tolist(), config)
    assert told["loss"] == pytest.approx(loss.item(), rel=1e-11)
    if values["type"] == "kto":
        assert told["kl"] == pytest.approx(kl_of(model, groups), rel=1e-11) and told["kl"] > 0, "or it shows nothing"
