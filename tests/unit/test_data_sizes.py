"""Many small files and huge rows: the work and the memory that they take."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config import DatasetConfig
from raytune_fsdp.data.sources import handles
from raytune_fsdp.data.sources import texts as small_texts
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source
from tests.ranks import run_ranks
from tests.rows import make_windows

MANY = 1000


def opened(path: Path, **options: Any) -> Source:
    return open_source(DatasetConfig(path=str(path)), cache=path.parent / "cache", **{"in_place": False, **options})


def write_many(directory: Path, many: int = MANY) -> None:
    directory.mkdir()
    for i in range(many):
        (directory / f"{i:05}.jsonl").write_text(f'{{"id": {2 * i}}}\n\n{{"id": {2 * i + 1}}}\n')


def test_many_small_files_are_prepared_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_many(tmp_path / "many")
    (tmp_path / "many/00500a.jsonl").write_text('{"id": -1}\n' * 100_000)  # a large one in their middle
    (tmp_path / "many/00500b.jsonl.gz").write_bytes(gzip.compress(b'{"id": -2}\n'))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    began = time.process_time()
    source = opened(tmp_path / "many")
    assert len(synced) < 20, "not a wait for storage for every file"
    assert len(list((tmp_path / "cache/files").iterdir())) == 3
    handles._HASHES.clear()
    again = pickle.loads(pickle.dumps(opened(tmp_path / "many")))
    # 0.3 ms of the processor a file, for both; it was 3 ms.
    assert time.process_time() - began < 1.5
    assert len(synced) < 20 and again.fingerprints == source.fingerprints and len(again) == 2 * MANY + 100_001
    rows = [row for row in again.rows(range(len(again))) if isinstance(row, dict)]
    assert [row["id"] for row in rows] == [*range(1002), *[-1] * 100_000, -2, *range(1002, 2 * MANY)]
    assert again.where(999) == f"{tmp_path}/many/00499.jsonl:3"
    assert again.where(len(again) - 1) == f"{tmp_path}/many/00999.jsonl:3"


def test_files_have_the_fingerprints_they_have_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_many(tmp_path / "many", 40)
    (tmp_path / "many/00007.jsonl").write_text("x" * 40_000 + "\n" + '{"id": 3}')  # in three blocks
    together = opened(tmp_path / "many")
    monkeypatch.setattr(small_texts, "_MANY", 41)
    alone = opened(tmp_path / "many")
    assert together.fingerprints == alone.fingerprints
    for index in range(len(alone)):
        ours, theirs = together.rows([index])[0], alone.rows([index])[0]
        assert str(ours) == str(theirs) and isinstance(ours, RowError) == isinstance(theirs, RowError)
        assert together.where(index) == alone.where(index)


def test_a_small_file_that_changes_is_found_among_many(tmp_path: Path) -> None:
    write_many(tmp_path / "many", 40)
    source, path = opened(tmp_path / "many"), tmp_path / "many/00017.jsonl"
    facts = path.stat()
    path.write_text('{"id": 99}\n\n{"id": 35}\n')
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert source.rows([33, 36]) == [{"id": 33}, {"id": 36}]
    with pytest.raises(DataError, match=r"00017\.jsonl: has other content than when it was opened"):
        source.rows([34])
    again = opened(tmp_path / "many")
    assert [k for k in again.fingerprints if again.fingerprints[k] != source.fingerprints[k]] == [str(path)]
    assert again.rows([34, 79]) == [{"id": 99}, {"id": 79}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.arrow"])
def test_a_row_that_is_too_large_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / name, [{"text": "a b " * n} for n in (10, 300, 20)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.Table.from_pylist(rows).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows))
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(row["text"] + "\n" for row in rows))
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    dataset = DatasetConfig.model_validate({"path": str(path), "format": {"type": "completion"}})
    where = r"rows\.\w+(:\d|, row 2)"
    for in_place in (True, False):
        source = open_source(dataset, cache=tmp_path / "cache", in_place=in_place, max_row_bytes=1000)
        assert len(source.rows([0, 2])) == 2
        with pytest.raises(
            DataError, match=rf"{where}: the row has 1,2\d\d bytes, more than data\.max_row_bytes=1000; sho"
        ):
            source.rows([0, 1])
    windows = make_windows([dataset], cache=tmp_path, max_row_bytes=1000, bad_rows="skip", long_documents="drop")
    with pytest.raises(DataError, match="set data.max_row_bytes=1"):
        windows.get(0, 0)
    enough = make_windows([dataset], cache=tmp_path, max_row_bytes=2000, long_documents="drop")
    assert enough.fingerprint == windows.fingerprint and enough.get(0, 0)[1]


def refuse_a_huge_row(directory: str) -> tuple[str, int]:
    """The refusal of a row of 50 MB, and the memory that it took above what there was."""
    path = Path(directory, "rows.jsonl")
    with open(path, "w") as file:
        file.write('{"text": "')
        for _ in range(50):
            file.write("word " * 200_000)
        file.write('"}\n')
    dataset = DatasetConfig.model_validate({"path": str(path), "format": {"type": "completion"}})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as failure:
        make_windows([dataset], cache=Path(directory), long_documents="truncate").get(0, 0)
    return str(failure.value), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def test_a_row_of_50_mb_takes_no_memory(tmp_path: Path) -> None:
    ((message, memory),) = run_ranks(refuse_a_huge_row, 1, str(tmp_path))
    assert "rows.jsonl:1: the row has 50,000,013 bytes, more than data.max_row_bytes=8000000" in message
    assert memory < 200 << 20
