"""All that decides the windows, by name: a run is continued, and a cached window used, only where it is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import xxhash

from raytune_fsdp.config.data import DataConfig, DatasetConfig
from raytune_fsdp.data.order import ORDER_VERSION
from raytune_fsdp.data.packed_window import FORMAT
from raytune_fsdp.data.rows.formats import DOCUMENT_VERSION
from raytune_fsdp.data.sources import Source
from raytune_fsdp.identity import named

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
    vocab_size: int,
    repeats: bool,
) -> dict[str, Any]:
    """By place, not by name: the order of the datasets decides the windows, what they are called does not."""
    files = {f"datasets.{i}.files": list(source.fingerprints.values()) for i, source in enumerate(sources)}
    formats = {f"datasets.{i}.format": named("format", dataset.format) for i, dataset in enumerate(datasets)}
    columnar = {f"datasets.{i}.columnar": source.columnar for i, source in enumerate(sources)}
    mixture = {f"datasets.{i}.weight": str(weight) for i, weight in enumerate(weights)}
    return {
        "order_version": ORDER_VERSION,
        "document_version": DOCUMENT_VERSION,
        "seed": seed,
        **files,
        **formats,
        **columnar,
        **mixture,
        "tokenizer": _tokenizer_fingerprint(tokenizer),
        "chat_template": template,
        "pad_id": pad_id,
        "vocab_size": vocab_size,
        "reshuffle": "windows" if repeats else "full",
        # Not bad_rows: if no row is bad both policies give the same, and a window that has left rows out is refused
        # where they are errors.
        **data.model_dump(include={"seq_len", "packing", "long_documents", "shuffle", "window"}),
    }


def files_by_key(sources: Sequence[Source]) -> dict[str, list[str]]:
    """The names of the files behind each key of an identity that lists files, as they are shown to people."""
    return {f"datasets.{i}.files": list(source.fingerprints) for i, source in enumerate(sources)}


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Of windows in the cache: what decides them, and how they are written."""
    return xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, identity], sort_keys=True).encode())


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by earlier calls with padding or truncation; no part of what the tokenizer is.
        content["padding"] = content["truncation"] = None
    else:
        content = tokenizer.get_vocab()
    special = [tokenizer.special_tokens_map, tokenizer.chat_template]  # templates are rendered with all of them
    text = json.dumps([type(tokenizer).__name__, content, special], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())
