"""Losses of groups against formulas by the book, each document computed alone: values, gradients, figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raytune_fsdp.base.batch import GROUP_COLUMNS, Cursor, MicroBatch, PackedSample, Role
from raytune_fsdp.config.sections.objectives import KtoObjective
from raytune_fsdp.config.sections.train import TrainConfig
from raytune_fsdp.data.batches import filler, to_batch
from raytune_fsdp.data.shared_batches import part_of
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.figures import group_values, values_of
from raytune_fsdp.model.objective.groups import GroupObjective, _Placed
from raytune_fsdp.model.objective.judged import KINDS
from raytune_fsdp.model.objective.kto import KtoLoss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.objective.told import Told
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


def test_sums_of_a_document_do_not_depend_on_what_it_is_packed_with() -> None:
    """To the bit; also where ranks have a part of the micro-batch each."""
    groups = groups_of(3, 6, whole=True)
    loss = objective_of(PAIRS["cpo"])
    together = to_batch([packed(groups, compares=False)], index=0, after=Cursor())
    random = torch.Generator().manual_seed(1)
    given = -torch.rand(together.target_tokens, generator=random, dtype=torch.float64) * 9
    found = answers_of(loss, given, together)
    first = 0
    for number, group in enumerate(groups):
        alone = to_batch([packed([group], compares=False)], index=0, after=Cursor())
        own = answers_of(loss, given[first : first + alone.target_tokens], alone)
        assert torch.equal(own, found[2 * number : 2 * number + 2])
        first += alone.target_tokens
    bent = loss.bend(given, together.targets)
    parts = [part_of(together, member, 3) for member in range(3)]
    assert [part.targets.before for part in parts] == [0, *np.cumsum([len(part.targets.ids) for part in parts])[:-1]]
    whole = replace(loss, group=None)
    mine = [Told.of(part.targets, torch.device("cpu")).groups for part in parts]
    assert [range(12)[2 * each.start : 2 * each.stop] for each in mine if each.stop > each.start]
    assert sum(each.stop - each.start for each in mine) == 6, "each group is counted by one rank"
    assert bent.total is not None and torch.equal(bent.total, whole.bend(given, together.targets).total)


def answers_of(loss: GroupObjective, log_probabilities: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    told = Told.of(batch.targets, torch.device("cpu"))
    return loss._documents(log_probabilities, batch.targets, told, _Placed.of(told)).answers


@pytest.mark.parametrize("name", ["dpo and sft", "kto"])
def test_a_filler_has_no_group(name: str) -> None:
    model = build("llama")
    objective = Objective(groups=replace(objective_of((PAIRS | KTO)[name]), kl=torch.zeros((), dtype=torch.float64)))
    for chunked in (False, True):
        if chunked:
            install_chunked_loss(model)
        losses = micro_batch_loss(model, filler(2, seq_len=16, pad_id=0), objective)
        losses.total.backward()  # type: ignore[no-untyped-call]
        assert losses.total.item() == 0.0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)
        assert losses.groups is not None and losses.groups.figures.shape == (len(KINDS), 0)


def test_a_step_without_a_reference_ends() -> None:
    batch = to_batch([packed(groups_of(0, 2, whole=False), compares=False)], index=0, after=Cursor())
    with pytest.raises(RuntimeError, match="nobody has computed the log-probabilities of the reference"):
        objective_of(PAIRS["dpo"]).bend(torch.zeros(batch.target_tokens), batch.targets)


def test_answers_that_are_nearly_certain_have_finite_odds() -> None:
    """ORPO's odds have a logarithm of what is left of 1, which rounds to 0."""
    batch = to_batch([packed(groups_of(0, 3, whole=True), compares=False)], index=0, after=Cursor())
    for value in (0.0, -1e-30, -1e-9, -800.0):
        bent = objective_of(PAIRS["orpo"]).bend(torch.full((batch.target_tokens,), value).double(), batch.targets)
        assert bent.total is not None and bent.total.isfinite() and bent.slopes.isfinite().all(), value


def test_weights_by_a_count_make_both_kinds_weigh_the_same() -> None:
    config = KtoObjective(type="kto", desirable_weight="auto", undesirable_weight=0.5)
    assert KtoLoss(config, (30, 60))._desirable == 1.0 and KtoLoss(config, (0, 5))._desirable == 0.5
    assert KtoLoss(config).counted(60, 30)._desirable == 0.25


def test_what_is_measured_without_a_reference() -> None:
    """Log-probabilities alone; there is nothing to say about no group."""
    config = TrainConfig.model_validate({"global_batch": 4, "max_steps": 1, "objective": PAIRS["dpo"]}).objective
    values = group_values([2.0, *[1.0] * (len(KINDS) - 1)], config, compared=False)
    assert values == {"logps/chosen": 1.0, "logps/rejected": 1.0}
    assert group_values([0.0] * len(KINDS), config) == {}
    assert {"loss", "rewards/accuracies", "rewards/margins"} < {*values_of(config)} and "kl" not in values_of(config)


def test_a_negative_divergence_counts_as_none() -> None:
    """The estimate by mismatched answers may be negative, and what it estimates never is."""
    loss, groups = KtoLoss(KtoObjective(type="kto")), torch.tensor(4.0)
    assert loss.estimate(torch.tensor(-3.0), groups) == 0.0 and loss.estimate(torch.tensor(3.0), groups) == 0.75
