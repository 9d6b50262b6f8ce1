"""Everything that decides the windows, by name: all must match for a run to continue, or a cached window to be used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import xxhash

from raytune_fsdp.config.sections.data import DataConfig, DatasetConfig
from raytune_fsdp.data.cache import FORMAT
from raytune_fsdp.data.mixture import FIFTH_ORDER
from raytune_fsdp.data.rows.formats import DOCUMENT_VERSION
from raytune_fsdp.data.rows.own_code import RowFunction
from raytune_fsdp.data.rows.scores.scoring import Scoring
from raytune_fsdp.data.rows.templates import load_template
from raytune_fsdp.data.sources.source import Source
from raytune_fsdp.plan.identity import ABSENT, ONE_BY_ONE, decided_by_data, named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def identity_of_windows(
    datasets: Sequence[DatasetConfig],
    data: DataConfig,
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    pad_id: int,
    vocab_size: int,
    repeats: bool,
    order_version: int,
    functions: Sequence[RowFunction | None],
) -> dict[str, Any]:
    """Return everything that decides the windows. `functions`: each dataset's user function, if its format has one.

    Datasets appear by place, not by name: their order decides the windows, their names do not.
    """
    formats = {
        f"datasets.{i}.format": named("format", dataset.format, exclude=("ignore",))
        for i, dataset in enumerate(datasets)
    }
    modules = {
        f"datasets.{i}.function_modules.{name}": content
        for i, each in enumerate(functions)
        if each is not None
        for name, content in each.own.modules.items()
    }
    # Without a selection: all rows.
    selections = {
        f"datasets.{i}.{key}": value
        for i, source in enumerate(sources)
        for key, value in source.selection.items()
        if value != ABSENT[f"datasets.{key}"]
    }
    return {
        "order_version": order_version,
        "document_version": DOCUMENT_VERSION,
        "seed": seed,
        **{f"datasets.{i}.files": list(source.fingerprints.values()) for i, source in enumerate(sources)},
        **formats,
        **{f"datasets.{i}.function_file": each.own.code for i, each in enumerate(functions) if each is not None},
        **modules,
        **{f"datasets.{i}.columnar": source.columnar for i, source in enumerate(sources)},
        **selections,
        **_templates_of(datasets),
        **{f"datasets.{i}.weight": str(weight) for i, weight in enumerate(weights)},
        "tokenizer": _tokenizer_fingerprint(tokenizer),
        "chat_template": None if data.chat_template is None else load_template(data.chat_template),
        "pad_id": pad_id,
        "vocab_size": vocab_size,
        "reshuffle": "windows" if repeats else "full",
        # Not max_row_bytes, which only refuses. Not bad_rows: without bad rows both policies give the same windows, and
        # a window that skipped rows is refused where bad rows are errors.
        **decided_by_data(data),
    }


def turns_of(by_turn: Sequence[bool], order_version: int) -> dict[str, Any]:
    """Return the entries for datasets each of whose turns is rendered to find it, as a trial of their template decides.

    The trial would find the same as long as nothing else changes. But it depends on code, Jinja's too, of which no
    identity says anything, and another outcome may give other masks. Under versions before 5, all turns were rendered
    before there was a trial.
    """
    wanted = order_version >= FIFTH_ORDER
    return {f"datasets.{i}.turns": ONE_BY_ONE for i, each in enumerate(by_turn) if each and wanted}


def told_of(columns: Sequence[str], over_all: bool, scoring: Scoring | None) -> dict[str, Any]:
    """Return the entries for what a loss needs in the windows: columns, more targets (`sft.over=all`), a head's."""
    found = ({"columns": list(columns)} if columns else {}) | ({"over_all": True} if over_all else {})
    if scoring is None:
        return found
    return found | {
        "head": {"pad_token": scoring.pad_token, "labels": list(scoring.labels), "outputs": scoring.outputs}
    }


def _templates_of(datasets: Sequence[DatasetConfig]) -> dict[str, Any]:
    """Return the entries for templates of datasets of their own."""
    found = {}
    for i, dataset in enumerate(datasets):
        text = None if dataset.chat_template is None else load_template(dataset.chat_template)
        for key, value in {"chat_template": text, "chat_template_kwargs": dataset.chat_template_kwargs}.items():
            if value != ABSENT[f"datasets.{key}"]:
                found[f"datasets.{i}.{key}"] = value
    return found


def files_by_key(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Return the names of the files that each `files` key of an identity stands for, as messages show them."""
    return {f"datasets.{i}.files": list(source.fingerprints) for i, source in enumerate(sources)}


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Return the fingerprint of windows in the cache: it covers all that decides them, and their file format."""
    return xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, identity], sort_keys=True).encode())


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # Earlier calls with padding or truncation leave these behind; they are not part of the tokenizer.
        content["padding"] = content["truncation"] = None
    else:
        content = tokenizer.get_vocab()
    special = [tokenizer.special_tokens_map, tokenizer.chat_template]  # templates are rendered with all of them
    text = json.dumps([type(tokenizer).__name__, content, special], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())
