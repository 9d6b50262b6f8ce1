"""Datasets of made-up tokens for tests, and the windows over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from raytune_fsdp.base.batch import PADDING, PackedSample
from raytune_fsdp.config import DataConfig, DatasetConfig, TokensFormat
from raytune_fsdp.data.rows.scores.scoring import Scoring
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.demo import TOKENIZER

VOCABULARY = 10_000


@cache
def demo_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def token_rows(
    directory: Path, lengths: Sequence[int], *, name: str = "rows", first_id: int = 2, **fields: Any
) -> DatasetConfig:
    """Row i is `lengths[i]` times the token `first_id + i`, so that a document is known by any of its tokens."""
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [first_id + i] * n}) + "\n" for i, n in enumerate(lengths)))
    return DatasetConfig(path=str(path), format=TokensFormat(type="tokens", labels=None), **fields)


def make_windows(
    datasets: Sequence[DatasetConfig],
    *,
    cache: Path,
    seed: int = 5,
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocab_size: int = VOCABULARY,
    order_version: int | None = None,
    columns: Sequence[str] = (),
    over_all: bool = False,
    scoring: Scoring | None = None,
    **options: Any,
) -> Windows:
    """Windows of 8 rows and samples of 16 tokens, unless `options` (of the data section) say otherwise."""
    data = DataConfig.model_validate({"train": datasets, "seq_len": 16, "window": 8, **options})
    tokenizer = tokenizer or demo_tokenizer()
    return Windows(
        datasets,
        data,
        seed=seed,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        cache=cache,
        order_version=order_version,
        columns=columns,
        over_all=over_all,
        scoring=scoring,
    )


def all_samples(windows: Windows, epoch: int = 0) -> list[PackedSample]:
    """The packed samples of an epoch, window by window."""
    return [sample for k in range(windows.count(epoch)) for sample in windows.get(epoch, k)[0].samples]


def documents_in(samples: Sequence[PackedSample]) -> list[tuple[int, int]]:
    """(token, length) of each run of a token, in order."""
    found: list[tuple[int, int]] = []
    for sample in samples:
        real = sample.input_ids[sample.source_ids != PADDING]
        starts = np.flatnonzero(np.diff(real, prepend=-1))
        found += zip(real[starts].tolist(), np.diff(np.append(starts, len(real))).tolist(), strict=True)
    return found
