"""Many small text files, prepared together: one directory of the cache for thousands of them instead of one for each.

A directory of its own costs a file 8 ms when it is made (four waits for storage) and 2 ms whenever it is opened.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.data.sources.blocks import BLOCK_BYTES, Blocks
from raytune_fsdp.data.sources.blocks import NAME as BLOCKS
from raytune_fsdp.data.sources.file_names import compression_of
from raytune_fsdp.data.sources.handles import Stored, check_unchanged
from raytune_fsdp.data.sources.prepared import PreparedRows, prepare
from raytune_fsdp.data.sources.source import File, reading
from raytune_fsdp.data.sources.texts import TextRows, find_rows, text_rows, with_keys

# From this many on: with few files, one that changes should not have the others read again.
_MANY = 32
_SMALL_BYTES = 1 << 20
# Files in a directory. If one of them changes, all are read again: 4 GB at most.
_TOGETHER = 4096
_TEXTS = "texts.json"


def small_groups(files: Sequence[File]) -> list[list[File]]:
    """The small files that are read where they are, in groups to be prepared together; none if they are few."""
    small = [file for file in files if not file.remote and file.size <= _SMALL_BYTES and not compression_of(file.url)]
    if len(small) < _MANY:
        return []
    return [small[first : first + _TOGETHER] for first in range(0, len(small), _TOGETHER)]


def open_small_texts(
    files: Sequence[File], kind: str, *, cache: Path, progress: Progress | None, every: int = 1, keys: bool = False
) -> list[TextRows]:
    """Find the rows of these files, unless an earlier run did; see `open_text`."""
    shown = f"{files[0].shown} and {len(files) - 1} more"

    def make(directory: Path) -> Mapping[str, Any]:
        texts = []
        with open(directory / "spans", "wb") as spans, open(directory / BLOCKS, "wb") as blocks:
            for number, file in enumerate(files):
                with reading(file.shown), open(file.url, "rb", buffering=0) as opened:
                    source = io.BytesIO(opened.read(_SMALL_BYTES))
                meta, hashing = find_rows(source, file.size, spans, file=file, kind=kind, progress=None, keys=keys)
                blocks.write(hashing.blocks())
                check_unchanged(file)
                texts.append(meta)
                if progress is not None:
                    progress(shown, number + 1, len(files))
        (directory / _TEXTS).write_text(json.dumps(texts), encoding="utf-8")
        return {"rows": sum(meta["rows"] for meta in texts)}

    def first_blocks(made: PreparedRows) -> Iterator[Blocks]:
        path, first = str(made.path / BLOCKS), 0
        for file in files:
            yield Blocks(path, first)
            first += -(-file.size // BLOCK_BYTES)

    def parts(made: PreparedRows) -> list[TextRows]:
        found: list[TextRows] = []
        row, spans = 0, str(made.path / "spans")
        texts = json.loads((made.path / _TEXTS).read_text(encoding="utf-8"))
        for file, meta, blocks in zip(files, texts, first_blocks(made), strict=True):
            stored = Stored(file.shown, file.url, file.size, meta["content"], blocks)
            found.append(text_rows(file, meta, stored=stored, spans=spans, first=row))
            row += meta["rows"]
        return with_keys(found, texts, made) if keys else found

    def holds(made: PreparedRows) -> bool:
        return all(blocks.hold(file, every) for file, blocks in zip(files, first_blocks(made), strict=True))

    facts = json.dumps([(file.url, file.size, file.version) for file in files])
    identity = {
        "preparation": "texts",
        "kind": kind,
        "files": len(files),
        "whole": xxhash.xxh3_128_hexdigest(facts.encode("utf-8", "surrogateescape")),
        "blocks": BLOCK_BYTES,
    }
    return parts(prepare(cache, identity, make, shown=shown, progress=progress, holds=holds))
