"""All that decides the windows, by name: a run is continued, and a cached window used, only where it is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import xxhash

from raytune_fsdp.config.data import DataConfig, DatasetConfig
from raytune_fsdp.data.order import ORDER_VERSION
from raytune_fsdp.data.sources import Source
from raytune_fsdp.data.window import FORMAT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def identity_of_windows(
    datasets: Sequence[DatasetConfig],
    data: DataConfig,
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    *,
    seed: int,
    pad_id: int,
    repeats: bool,
) -> dict[str, Any]:
    """By place, not by name: the order of the datasets decides the windows, what they are called does not."""
    files = {
        f"datasets.{i}.files.{j}": fingerprint
        for i, source in enumerate(sources)
        for j, fingerprint in enumerate(source.fingerprints.values())
    }
    formats = {f"datasets.{i}.format": dataset.format.model_dump() for i, dataset in enumerate(datasets)}
    mixture = {f"datasets.{i}.weight": str(weight) for i, weight in enumerate(weights)}
    return {
        "order_version": ORDER_VERSION,
        "window_format": FORMAT,
        "seed": seed,
        **files,
        **formats,
        **mixture,
        "tokenizer": _tokenizer_fingerprint(tokenizer),
        "chat_template": template,
        "pad_id": pad_id,
        "reshuffle": "windows" if repeats else "full",
        **data.model_dump(include={"seq_len", "packing", "long_documents", "bad_rows", "shuffle", "window"}),
    }


def files_by_key(sources: Sequence[Source]) -> dict[str, str]:
    """The file behind each key of an identity, as it is shown to people."""
    return {
        f"datasets.{i}.files.{j}": name
        for i, source in enumerate(sources)
        for j, name in enumerate(source.fingerprints)
    }


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by earlier calls with padding or truncation; no part of what the tokenizer is.
        content["padding"] = content["truncation"] = None
    else:
        content = tokenizer.get_vocab()
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template]
    text = json.dumps([type(tokenizer).__name__, content, special], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())
