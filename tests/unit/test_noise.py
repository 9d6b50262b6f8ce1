"""NEFTune's noise: as large as the paper says, in training only, the same whatever the layout of a block."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from raytune_fsdp.base.batch import PADDING, MicroBatch
from raytune_fsdp.data.batches import filler
from raytune_fsdp.model.objective.embedding_noise import noisy_embeddings
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.proof import documents
from tests.models import build

ALPHA, WIDTH = 5.0, 32


@pytest.fixture
def block() -> MicroBatch:
    """Two samples of 19 tokens, of which the second ends in eight of padding."""
    made = documents(build("llama"), torch.device("cpu"))
    sources = made.source_ids.clone()
    sources[1, 11:] = PADDING
    return replace(made, source_ids=sources)


def noise(block: MicroBatch, *, seed: int = 0, one_row: bool = False, alpha: float | None = ALPHA) -> torch.Tensor:
    """What is added to the embeddings of a block."""
    model = build("llama").train()
    embedding, ids = model.get_input_embeddings(), block.input_ids.reshape(1, -1) if one_row else block.input_ids
    with torch.no_grad():
        without = embedding(ids)
        torch.manual_seed(seed)
        with noisy_embeddings(model, block, alpha):
            found = embedding(ids) - without
        assert torch.equal(embedding(ids), without), "nothing is left behind"
    return found.view(*block.input_ids.shape, WIDTH)


def test_it_is_as_large_as_the_paper_says(block: MicroBatch) -> None:
    """alpha / sqrt(L x width), of the tokens that each sample has."""
    found = noise(block)
    for row, tokens in ((0, 19), (1, 11)):
        bound = ALPHA / math.sqrt(tokens * WIDTH)
        largest, mean = found[row, :tokens].abs().max().item(), found[row, :tokens].mean().item()
        assert 0.99 * bound < largest <= 1.00001 * bound
        # Of 352 numbers or more the mean is within four of its standard deviations.
        assert abs(mean) < 4 * bound / math.sqrt(3 * tokens * WIDTH)


def test_it_follows_from_the_random_state_alone(block: MicroBatch) -> None:
    assert torch.equal(noise(block), noise(block)) and not torch.equal(noise(block), noise(block, seed=1))
    assert torch.allclose(noise(block), noise(block, one_row=True), atol=1e-7), "as kernels with borders see it"
    assert not noise(block, alpha=None).any()


def test_a_filler_has_no_noise_that_is_not_finite() -> None:
    assert noise(filler(2, seq_len=19, pad_id=0)).isfinite().all()


def test_only_a_step_has_it(block: MicroBatch) -> None:
    """A loss without an objective, as evaluations take it, is the same as ever, in training mode, too."""
    model = build("llama").train()
    noisy = Objective(neftune_noise_alpha=ALPHA)
    losses = [micro_batch_loss(model, block, *objective).total.item() for objective in ((), (noisy,), (noisy,), ())]
    assert losses[0] == losses[3] and len(set(losses)) == 3
