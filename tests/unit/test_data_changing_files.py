"""Files that change underneath a run: noticed before a row of the new content is used, whatever size and time say."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config import DatasetConfig
from raytune_fsdp.data.sources import arrow, opening
from raytune_fsdp.data.sources.handles import CHUNK_BYTES
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source
from tests.rows import make_windows, token_rows

ROWS = 4000


def content(letter: str) -> list[dict[str, Any]]:
    """As many bytes whatever the letter is, 200 KB, in many blocks."""
    return [{"id": f"{i:05}", "text": letter * (20 + i % 60)} for i in range(ROWS)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([["id", "text"], *(row.values() for row in rows)])
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500, compression=None, use_dictionary=False)
    else:
        table = pa.Table.from_pylist(rows)
        kind = pa.ipc.new_file if path.name.startswith("file") else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=500)


def rewrite(path: Path) -> None:
    """In place, with the time it had: only its content tells."""
    facts, size = os.stat(path), os.path.getsize(path)
    write(path, content("b"))
    assert os.path.getsize(path) == size and os.stat(path).st_ino == facts.st_ino
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def replace(path: Path) -> None:
    other = path.with_name(f"other-{path.name}")
    write(other, content("c"))
    os.replace(other, path)


CHANGES = [rewrite, truncate, replace]
FILES = ["rows.jsonl", "rows.csv", "file.arrow", "stream.arrow", "rows.parquet"]


def opened(path: Path) -> Source:
    return open_source(
        DatasetConfig(path=str(path), format={"type": "completion"}), cache=path.parent / "cache", in_place=True
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_no_row_of_a_changed_file_is_used(tmp_path: Path, name: str, change: Callable[[Path], None]) -> None:
    path = tmp_path / name
    write(path, content("a"))
    source = opened(path)
    known = source.rows([7, 8])
    change(path)
    with pytest.raises(
        DataError, match=rf"{name}: has (other content|\d+ bytes, had \d+) .*when it was opened; a .*final"
    ):
        source.rows([3900])
    # The next command finds what the file is now, although its name, size and time are in the cache.
    if change is truncate:
        write(path, content("d"))
    again = opened(path)
    assert list(again.fingerprints.values()) != list(source.fingerprints.values())
    ((row,), letter) = again.rows([7]), {rewrite: "b", truncate: "d", replace: "c"}[change]
    assert isinstance(row, dict) and row["text"] == letter * 27 and len(again) == ROWS
    assert [each["text"] for each in known] == ["a" * 27, "a" * 28]  # type: ignore[index]


@pytest.mark.parametrize("name", FILES)
def test_what_keeps_its_content_is_never_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, content("a"))
    source = opened(path)
    wanted = source.rows([5, 3999])
    copied = tmp_path / "copied"
    copied.write_bytes(path.read_bytes())
    os.replace(copied, path)
    os.utime(path, (1, 1))
    assert source.rows([2000, 3999]) == [*source.rows([2000]), wanted[1]]
    assert opened(path).fingerprints == source.fingerprints
    path.unlink()
    assert source.rows([1000, 5])[1] == wanted[0], "what is open is still what it was"


def test_nothing_of_a_changed_file_enters_the_cache_under_its_old_fingerprint(tmp_path: Path) -> None:
    rows = token_rows(tmp_path, [5] * 20)
    windows = make_windows([rows], cache=tmp_path, shuffle="none")
    windows.get(0, 0)
    path, facts = Path(str(rows.path)), os.stat(str(rows.path))
    path.write_text(path.read_text().replace("20, 20", "30, 30"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(DataError, match=r"rows\.jsonl: has other content than when it was opened"):
        windows.get(0, 2)
    assert len(list(windows.cache.directory.glob("*.arrow"))) == 1
    assert make_windows([rows], cache=tmp_path, shuffle="none").fingerprint != windows.fingerprint


def test_of_large_data_a_part_is_compared_when_it_is_opened_and_all_of_it_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_COMPARED_BYTES", 4 * CHUNK_BYTES)
    path = tmp_path / "rows.jsonl"
    write(path, content("a"))
    before = opened(path).fingerprints
    facts, data = os.stat(path), bytearray(path.read_bytes())
    assert len(data) > 16 * CHUNK_BYTES
    data[data.index(b"aaaa", 5 * CHUNK_BYTES // 2)] = ord("x")  # in the third block, of which every fifth is compared
    path.write_bytes(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    again = opened(path)
    assert again.fingerprints == before
    with pytest.raises(DataError, match="has other content"):
        again.rows(range(ROWS))
    assert opened(path).fingerprints != before, "and once that was seen, when it is opened"


COPIED = ["rows.jsonl.gz", "rows.parquet.gz", "file.arrow.gz"]


@pytest.mark.parametrize(
    ("name", "remote"), [("rows.jsonl", True), *[(name, remote) for name in COPIED for remote in (True, False)]]
)
def test_what_changes_while_it_is_copied_is_not_kept(
    tmp_path: Path, name: str, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, place = tmp_path / name, f"memory://changing/{name}"
    memory, known = fsspec.filesystem("memory"), dict[str, Any]()

    def save(letter: str) -> None:
        write(plain := tmp_path / "new" / name.removesuffix(".gz"), content(letter))
        new = gzip.compress(plain.read_bytes()) if name.endswith(".gz") else plain.read_bytes()
        plain.write_bytes(new)
        os.replace(plain, path)
        if remote:
            memory.pipe(place, path.read_bytes())

    # As some clients do, it goes on saying what it has said once.
    info = type(memory).info
    monkeypatch.setattr(type(memory), "info", lambda self, of, **_: known.setdefault(of, info(self, of)))
    monkeypatch.setattr(type(memory), "invalidate_cache", lambda self, of=None: known.clear())
    letters = ["b"]
    (tmp_path / "new").mkdir()

    def copied(*_: object) -> None:
        if letters:
            save(letters.pop())

    save("a")
    dataset = DatasetConfig.model_validate({"path": place if remote else str(path), "format": {"type": "completion"}})
    said = "was replaced while it was copied" if remote else "is being written to"
    try:
        with pytest.raises(DataError, match=f"{name}: {said}; start again with the final"):
            open_source(dataset, cache=tmp_path / "cache", in_place=False, progress=copied)
        assert not letters and not list((tmp_path / "cache/files").iterdir())
        known.clear()
        again = open_source(dataset, cache=tmp_path / "cache", in_place=False, progress=copied)
        assert again.rows([7]) == [{"text": "b" * 27, **({"id": "00007"} if "jsonl" in name else {})}]
    finally:
        if remote:
            memory.rm("/changing", recursive=True)


def test_an_arrow_file_with_huge_batches_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.arrow"
    write(path, content("a"))
    plain = opened(path)
    monkeypatch.setattr(arrow, "LARGEST_BATCH", 1 << 14)
    path.rename(tmp_path / "other.arrow")
    copied = opened(tmp_path / "other.arrow")
    assert list(copied.blocks) == list(plain.blocks) == [500] * 8, "the order of data.shuffle=blocks"
    assert list(copied.fingerprints.values()) == list(plain.fingerprints.values())
    assert copied.rows([3999, 0]) == [{"text": content("a")[i]["text"]} for i in (3999, 0)]
