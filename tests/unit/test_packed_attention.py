"""What a model says about a packed document is what it says about that document alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.types import Cursor
from tests.models import VOCABULARY, build
from tests.rows import all_samples, make_windows, token_rows

FLEX = [
    # Compiled for a minute on a CPU; GPT-2 does not support it.
    pytest.param(name, "flex_attention", marks=pytest.mark.slow)
    for name in ("llama", "qwen3", "gemma3_text")
]


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [(name, way) for name in ("llama", "qwen3", "gemma3_text", "gpt2") for way in ("eager", "sdpa")] + FLEX,
)
def test_packed_equals_alone(tmp_path: Path, architecture: str, attention: str) -> None:
    model = build(architecture)  # in fp32; Gemma's sliding window of 16 is shorter than most documents
    model.set_attn_implementation(attention)
    lengths = [5, 2, 17, 40, 9, 23, 3, 31, 12, 28]
    generator = torch.Generator().manual_seed(0)
    windows = make_windows([token_rows(tmp_path, lengths)], cache=tmp_path, seq_len=64, window=10)
    batch = to_batch(all_samples(windows), index=0, after=Cursor())
    # Other tokens in the same places: a document of one repeated token would hide a leak.
    ids = torch.randint(3, VOCABULARY, batch.input_ids.shape, generator=generator)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=batch.position_ids, use_cache=False).logits
        compared = 0
        for row in range(len(ids)):
            starts = [*torch.nonzero(batch.position_ids[row] == 0).flatten().tolist(), ids.shape[1]]
            for start, end in zip(starts, starts[1:], strict=False):
                if batch.source_ids[row, start] < 0:
                    continue
                alone = model(input_ids=ids[row : row + 1, start:end], use_cache=False).logits[0]
                assert (packed[row, start:end] - alone).abs().max() <= 1e-5 * max(1.0, alone.abs().max().item())
                compared += 1
    assert compared == len(lengths)
