"""Losses of scores by the book, each document alone in transformers' class: values, gradients, figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from raytune_fsdp.base.batch import Cursor, MicroBatch
from raytune_fsdp.config.sections.model import HeadConfig
from raytune_fsdp.config.sections.train import TrainConfig
from raytune_fsdp.data.batches import filler, to_batch
from raytune_fsdp.data.shared_batches import part_of
from raytune_fsdp.model.objective.figures import group_values, values_of
from raytune_fsdp.model.objective.judged import SCORE_KINDS
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.objective.score_head import ScoreHead
from raytune_fsdp.model.objective.scores import ScoreObjective
from raytune_fsdp.model.objective.told import Told
from raytune_fsdp.model.score_head import put_score_head
from raytune_fsdp.plan.step_counts import GROUPS, TARGETS, _of_groups
from tests.models import VOCABULARY, build
from tests.scores import OBJECTIVES, documents_of, loss_of, outputs_of, packed, twin_of

LENGTH = 64


def objective_of(values: dict[str, Any]) -> ScoreObjective:
    config = TrainConfig.model_validate({"global_batch": 4, "max_steps": 1, "objective": values})
    return ScoreObjective.of(config.objective)


def scoring(kind: str, outputs: int) -> Any:
    """A small network with a head of random weights, in fp64."""
    model = build(kind, attn_implementation="eager").double().eval()
    put_score_head(model, HeadConfig(type="score", outputs=outputs))
    head = model.get_output_embeddings()
    assert isinstance(head, ScoreHead)
    values = torch.randn(outputs, head.in_features, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    head.weight = torch.nn.Parameter(values)
    return model


def counts_of(batches: Sequence[MicroBatch]) -> torch.Tensor:
    counts = torch.zeros(8, dtype=torch.int64)
    counts[TARGETS], counts[GROUPS] = sum(each.target_tokens for each in batches), _of_groups(batches)[0]
    return counts


def nobody(_: Any) -> torch.Tensor:
    raise AssertionError("these losses do not look ahead")


@pytest.mark.parametrize(("kind", "bound", "of_gradients"), [("gpt2", 1e-11, 1e-9), ("llama", 1e-7, 1e-5)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients_are_those_of_the_book(name: str, kind: str, bound: float, of_gradients: float) -> None:
    """The first architecture is tied; norms of the second compute in fp32 whatever its weights are in."""
    values = OBJECTIVES[name]
    each = documents_of(values, 7, vocabulary=VOCABULARY)
    size = 2 if values["type"] == "reward" else 1
    samples = [packed(each[a * size : b * size], LENGTH, dataset=a % 2) for a, b in ((0, 2), (2, 5), (5, 7))]
    batches = [to_batch(samples[:2], index=0, after=Cursor()), to_batch(samples[2:], index=1, after=Cursor())]
    model = scoring(kind, outputs_of(values))
    twin = twin_of(model, model.get_output_embeddings().weight.detach())
    loss = loss_of(twin, each, values)
    loss.backward()  # type: ignore[no-untyped-call]
    counts = counts_of(batches)
    objective = Objective(groups=objective_of(values)).of_step(counts, nobody)
    figures, total = torch.zeros(len(SCORE_KINDS), dtype=torch.float64), 0.0
    for batch in batches:
        found = micro_batch_loss(model, batch, objective)
        (found.total / counts[TARGETS]).backward()  # type: ignore[no-untyped-call]
        assert found.groups is not None and not found.groups.figures.requires_grad
        assert found.scores is not None and found.scores.shape == (batch.target_tokens, outputs_of(values))
        figures += found.groups.figures.sum(1)
        total += found.total.item() / int(counts[TARGETS])
    assert total == pytest.approx(loss.item(), rel=bound)
    wanted = {name: p.grad for name, p in twin.base_model.named_parameters()}
    for key, parameter in model.base_model.named_parameters():
        apart = float((parameter.grad - wanted[key]).abs().max())
        assert apart <= of_gradients * max(1e-3, float(wanted[key].abs().max())), key
    of_head = twin.score.weight.grad
    apart = float((model.get_output_embeddings().weight.grad - of_head).abs().max())
    assert apart <= of_gradients * float(of_head.abs().max())
    config = objective_of(values).config
    told = group_values(figures.tolist(), config)
    assert told["loss"] == pytest.approx(loss.item(), rel=bound) and list(told) == values_of(config)


@pytest.mark.parametrize("name", ["reward centred", "classification weighted"])
def test_packed_documents_and_parts_are_documents_alone(name: str) -> None:
    """Whatever they are packed with; where ranks share a micro-batch, each group is one rank's."""
    values = OBJECTIVES[name]
    each = documents_of(values, 4, vocabulary=VOCABULARY, longest=7)
    model, loss = scoring("gpt2", outputs_of(values)), objective_of(values)
    together = to_batch([packed(each, LENGTH)], index=0, after=Cursor())
    with torch.no_grad():
        scores = micro_batch_loss(model, together).scores
        assert scores is not None
        size = loss.size
        for first in range(0, len(each), size):
            alone = to_batch([packed(each[first : first + size], LENGTH)], index=0, after=Cursor())
            own = loss.own(model, alone)
            assert torch.allclose(own.scores, scores[first : first + size], rtol=1e-11, atol=0)
    bent = loss.bend(scores, together.targets)
    parts = [part_of(together, member, 3) for member in range(3)]
    told = [Told.of(part.targets, torch.device("cpu"), size).groups for part in parts]
    assert [place for own in told for place in range(own.start, own.stop)] == list(range(4))
    assert bent.values.shape == (len(each),) and bent.slopes.shape == scores.shape and bent.total is not None
    assert bent.values.sum() / size == pytest.approx(bent.total.item(), rel=1e-12)


@pytest.mark.parametrize("name", ["reward", "classification", "regression"])
def test_a_filler_has_no_document(name: str) -> None:
    values = OBJECTIVES[name]
    model = scoring("llama", outputs_of(values))
    losses = micro_batch_loss(model, filler(2, seq_len=16, pad_id=0), Objective(groups=objective_of(values)))
    losses.total.backward()  # type: ignore[no-untyped-call]
    assert losses.total.item() == 0.0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    assert losses.groups is not None and losses.groups.figures.shape == (len(SCORE_KINDS), 0)


def test_documents_with_several_targets_are_none_to_score() -> None:
    sample = packed(documents_of(OBJECTIVES["regression"], 1, vocabulary=VOCABULARY, seed=1), LENGTH)
    sample.labels[1] = sample.input_ids[1]
    targets = to_batch([sample], index=0, after=Cursor()).targets
    with pytest.raises(RuntimeError, match="1 documents with 2 targets: each is scored once"):
        objective_of(OBJECTIVES["regression"]).bend(torch.zeros(2, 1), targets)
