"""A teacher whose distribution is known: its predictions teach in a few steps what its texts alone do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from raytune_fsdp.base.batch import IGNORE, Cursor, MicroBatch, PackedSample, Taught
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.model.attention.choose import logits_of
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.distillation import Distillation
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import CROSS_ENTROPY, Objective
from tests.models import build

TOKENS, LENGTH, SAMPLES, STEPS, KEPT = 64, 48, 8, 80, 16


class Table:
    """A teacher that says the next token by the one before it, and texts that it has written."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.log_p = (2 * torch.randn(TOKENS, TOKENS, generator=self._generator)).log_softmax(-1)

    def batch(self) -> MicroBatch:
        ids = torch.randint(TOKENS, (SAMPLES, 1), generator=self._generator)
        for _ in range(LENGTH - 1):
            ids = torch.cat([ids, torch.multinomial(self.log_p[ids[:, -1]].exp(), 1, generator=self._generator)], 1)
        rows, positions = ids.numpy().astype(np.int32), np.arange(LENGTH, dtype=np.int32)
        samples = [
            PackedSample(
                input_ids=row, labels=np.where(positions == 0, IGNORE, row).astype(np.int32), position_ids=positions,
                source_ids=np.zeros_like(row), id=number,
            )
            for number, row in enumerate(rows)
        ]  # fmt: skip
        return to_batch(samples, index=0, after=Cursor())

    def taught(self, batch: MicroBatch) -> MicroBatch:
        """The batch with what the teacher says of it."""
        values, ids = self.log_p[batch.input_ids.flatten()[batch.targets.places]].sort(dim=-1, descending=True)
        said = Taught(ids=ids[:, :KEPT].int(), log_probabilities=values[:, :KEPT], rest=values[:, KEPT:].logsumexp(-1))
        return replace(batch, targets=replace(batch.targets, teacher=said))


@cache
def distance(seed: int, objective: Objective) -> float:
    """The divergence from teacher to student, of all tokens, after these steps on texts of the teacher."""
    table = Table(seed)
    torch.manual_seed(seed)
    student = build("llama", vocab_size=TOKENS)
    install_chunked_loss(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    for _ in range(STEPS):
        batch = table.taught(table.batch())
        optimizer.zero_grad()
        (micro_batch_loss(student, batch, objective).total / batch.target_tokens).backward()
        optimizer.step()
    batch = table.batch()
    with torch.no_grad():
        logits = logits_of(student, batch.input_ids, batch.position_ids, batch.borders).flatten(0, 1)
    log_q, log_p = logits.log_softmax(-1)[batch.targets.places], table.log_p[batch.input_ids.flatten()]
    log_p = log_p[batch.targets.places]
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [Distillation(), Distillation(forward=0.5, reverse=0.5)],
    ids=str,
)
def test_a_student_comes_nearer_to_its_teacher_than_by_its_texts(what: Distillation) -> None:
    by_texts, by_teacher = (
        [distance(seed, objective) for seed in range(3)] for objective in (CROSS_ENTROPY, Objective(distillation=what))
    )
    spread = max(max(each) - min(each) for each in (by_texts, by_teacher))
    assert min(by_texts) - max(by_teacher) > spread, (by_texts, by_teacher)
