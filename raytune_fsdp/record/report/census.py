"""`data.json` of a run directory: what became of the rows, for the page about the run.

The cache has the same counts, but it is shared by all runs, may be elsewhere, and is cleaned.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytune_fsdp.base.untrusted import MIB, UnsoundError, is_count, read_json
from raytune_fsdp.plan.counts import Census

_BYTES = 16 * MIB  # 2,000 datasets take 2 MB
_OCTAVES = 63
_COUNTS = ("rows", "documents", "tokens", "target_tokens", "truncated", "cut", "without_targets")


def data_of(census: Census) -> str:
    """The text of the file. Without the rows that were left out: they are events, and quote what is in them."""
    return replace(census, skipped=(), built=0).to_json()


def census_of(path: Path) -> Census:
    """The counts in the file. ValueError if it is not one of ours."""
    values = read_json(path, limit=_BYTES)
    if not _is_census(values):
        raise UnsoundError("is not a count of rows")
    return Census.from_json(json.dumps({**values, "skipped": [], "built": 0}))


def _is_census(values: Any) -> bool:
    if not isinstance(values, dict) or values.keys() != {*Census.__dataclass_fields__}:
        return False
    names, datasets, epochs = values["names"], values["datasets"], values["epochs"]
    if not all(isinstance(each, list) for each in (names, datasets, epochs)) or len(names) != len(datasets):
        return False
    known = is_count(values["seq_len"]) and is_count(values["windows"]) and all(map(is_count, epochs))
    return (
        known and all(isinstance(name, str) and len(name) <= 300 for name in names) and all(map(_is_dataset, datasets))
    )


def _is_dataset(values: Any) -> bool:
    if not isinstance(values, dict) or values.keys() != {*_COUNTS, "dropped", "lengths"}:
        return False
    dropped, lengths = values["dropped"], values["lengths"]
    if not isinstance(dropped, dict) or not isinstance(lengths, dict):
        return False
    counts = [*(values[name] for name in _COUNTS), *dropped.values(), *lengths.values()]
    buckets = [bucket.isascii() and bucket.isdecimal() and len(bucket) < 4 for bucket in lengths]
    return all(map(is_count, counts)) and all(buckets) and all(int(each) < 4 * _OCTAVES for each in lengths)
