"""What sources keep in the cache: made once, whole or not there, and small in memory."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.data.sources import handles, prepared, texts
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.prepared import prepare_file
from raytune_fsdp.data.sources.source import Source

ROWS = [{"id": index, "text": "x" * (index % 50)} for index in range(20_000)]


def opened(path: Path, **options: Any) -> Source:
    return open_source(DatasetConfig(path=str(path)), **{"cache": path.parent / "cache", "in_place": False, **options})


def entries(path: Path) -> list[Path]:
    return sorted((path.parent / "cache/files").iterdir())


@cache
def content(suffix: str) -> bytes:
    if suffix == ".parquet":
        table = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(ROWS), table, row_group_size=6000)
        return table.getvalue()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    return gzip.compress(lines, 1) if suffix == ".gz" else lines


@pytest.fixture(params=["rows.jsonl", pytest.param("rows.jsonl.gz", marks=pytest.mark.slow), "rows.parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / request.param
    path.write_bytes(content(path.suffix))
    return path


def test_it_is_made_once_and_used_again(path: Path) -> None:
    def refuse(what: str, done: int, total: int) -> None:
        raise AssertionError(f"{what} is read again")

    told: list[tuple[str, int, int]] = []
    first = opened(path, progress=lambda *facts: told.append(facts))
    assert {what for what, _, _ in told} == {str(path), f"checking {path}"}
    assert told[-1][1] == told[-1][2] > 0
    (entry,) = entries(path)
    # `data clean` knows it by this.
    assert re.fullmatch(r"[0-9a-f]{32}", entry.name)
    os.utime(entry / "meta.json", (1, 1))
    again = opened(path, progress=refuse)
    assert again.rows([19_999, 0]) == first.rows([19_999, 0]) == [ROWS[-1], ROWS[0]]
    assert time.time() - (entry / "meta.json").stat().st_mtime < 60, "the time of its last use"
    meta = json.loads((entry / "meta.json").read_text())
    assert meta["rows"] == len(ROWS)
    assert "identity" in meta
    assert meta["files"] == {file.name: file.stat().st_size for file in entry.iterdir() if file.name != "meta.json"}


@pytest.mark.parametrize("damage", ["cut", "file gone", "meta gone", "meta broken"])
def test_what_is_damaged_is_made_again(path: Path, damage: str) -> None:
    fingerprints = opened(path).fingerprints
    (entry,) = entries(path)
    for file in sorted(entry.iterdir()):
        if (file.name == "meta.json") != damage.startswith("meta"):
            continue
        if damage.endswith("gone"):
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1)
    again = opened(path)
    assert again.fingerprints == fingerprints
    assert again.rows(range(20_000)) == ROWS
    assert entries(path) == [entry]


def test_one_flipped_bit_is_found_and_made_again(path: Path) -> None:
    fingerprints = opened(path).fingerprints
    (entry,) = entries(path)
    names = {file.name for file in entry.iterdir()}
    assert names - {"meta.json", "blocks"} in ({"spans"}, {"spans", "content"}, _ARROW)
    for name in sorted(names, reverse=True):
        opened(path).rows(range(20_000))
        whole = (entry / name).read_bytes()
        damaged = bytearray(whole)
        # A digit of the number of rows, a letter of a text, or whatever it is.
        middle = len(whole) // 2
        at = whole.index(b"20000") + 1 if name == "meta.json" else max(whole.find(b"xxxx", middle), middle)
        damaged[at] ^= 1
        facts = (entry / name).stat()
        (entry / name).write_bytes(damaged)
        os.utime(entry / name, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        handles._HASHES.clear()  # as another process
        again = opened(path)
        assert again.fingerprints == fingerprints
        assert len(again) == 20_000
        assert again.rows(range(20_000)) == ROWS, name
        assert name == "meta.json" or (entry / name).read_bytes() == whole
    assert entries(path) == [entry]


_ARROW = {"rows.arrow", "batches", "groups"}


def test_another_process_checks_what_it_did_not_make(path: Path) -> None:
    opened(path)
    handles._HASHES.clear()
    told: list[tuple[str, int, int]] = []
    opened(path, progress=lambda *facts: told.append(facts))
    assert {what for what, _, _ in told} == {f"checking {path}"}
    (entry,) = entries(path)
    size = sum(file.stat().st_size for file in entry.iterdir() if file.name != "meta.json")
    assert told[-1][1:] == (size, size)
    told.clear()
    opened(path, progress=lambda *facts: told.append(facts))
    assert not told, "once"


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_in_use_is_touched_now_and_then(path: Path, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pickle.loads(pickle.dumps(opened(path, in_place=in_place)))
    (entry,) = entries(path)

    def touched() -> bool:
        os.utime(entry / "meta.json", (1, 1))
        source.touch()
        return (entry / "meta.json").stat().st_mtime > 1

    assert touched()
    assert not touched(), "not for every window"
    later = time.monotonic() + 3601
    monkeypatch.setattr(prepared, "time", SimpleNamespace(monotonic=lambda: later))
    assert touched()
    entry.rename(entry.with_name("elsewhere"))
    later += 3601
    source.touch()


@pytest.mark.parametrize(("of", "name"), [(Path, "read_text"), (prepared, "hash_once")])
def test_what_cannot_be_read_now_stays(tmp_path: Path, of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run may be reading it: storage that fails here for a moment says nothing of what is there."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n')
    source = opened(path)
    (entry,) = entries(path)
    before = {file: file.stat().st_ino for file in entry.iterdir()}

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(of, name, fails)
        with pytest.raises(DataError, match=rf"{entry}: cannot be read \(Input/output error\); start again; if it"):
            opened(path)
    assert {file: file.stat().st_ino for file in entry.iterdir()} == before
    assert opened(path).rows([0]) == source.rows([0])


def test_a_cache_that_is_gone_is_said_so(path: Path) -> None:
    source = opened(path)
    (entry,) = entries(path)
    entry.rename(entry.with_name("elsewhere"))
    with pytest.raises(
        DataError, match=r"cache/files/.* cannot be read \(No such file.*data\.cache\.path must be visible to all"
    ):
        source.rows([0])


def test_a_full_disk_leaves_nothing(path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old[1]))
    try:
        with pytest.raises(
            DataError, match=r"cannot be prepared in the cache .*cache \(.*\); free space there, or change"
        ):
            opened(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert entries(path) == []
    assert opened(path).rows([5]) == [ROWS[5]]


def test_a_killed_process_leaves_nothing_that_counts(path: Path) -> None:
    code = f"""
import os, pathlib
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.data.sources.opening import open_source
path = pathlib.Path({str(path)!r})
dataset = DatasetConfig(path=str(path))
open_source(dataset, cache=path.parent / "cache", in_place=False, progress=lambda *facts: os._exit(9))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert [entry.suffix for entry in entries(path)] == [".tmp"]
    assert opened(path).rows(range(20_000)) == ROWS


def test_two_that_prepare_at_once(tmp_path: Path) -> None:
    both = threading.Barrier(2)
    made = []

    def make(directory: Path) -> dict[str, Any]:
        (directory / "file").write_text("content")
        both.wait(timeout=30)
        return {"rows": 1, "content": ""}

    def run() -> None:
        made.append(prepare_file(tmp_path, {"what": "x"}, make, shown="x"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert made[0] == made[1]
    assert [entry.name for entry in (tmp_path / "files").iterdir()] == [made[0].path.name]
    assert (made[0].path / "file").read_text() == "content"


def test_many_threads_read_one_source(path: Path) -> None:
    source = opened(path, in_place=True)
    wrong: list[Any] = []

    def read(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(10):
            indices = choose.choices(range(len(ROWS)), k=20)
            wrong.extend(indices if source.rows(indices) != [ROWS[index] for index in indices] else [])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for index in range(400):
        (tmp_path / f"many/{index:03}.jsonl").write_text(f'{{"id": {index}}}\n')
    source = opened(tmp_path / "many")
    before = psutil.Process().num_fds()
    assert source.rows(range(399, -1, -1)) == [{"id": index} for index in range(399, -1, -1)]
    assert psutil.Process().num_fds() - before < 300


def test_small_files_are_read_whole_whatever_a_read_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems of programs (FUSE) may give a part of what is asked for."""

    class Piecemeal(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(5)

        def readinto(self, buffer: Any) -> int | None:
            return super().readinto(memoryview(buffer)[:5])

    def open_piecemeal(file: Any, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
        if mode != "rb":
            return open(file, mode, buffering, **more)
        return Piecemeal(file) if buffering == 0 else io.BufferedReader(Piecemeal(file))

    (tmp_path / "many").mkdir()
    for index in range(40):
        (tmp_path / f"many/{index:03}.jsonl").write_text('{"id": 1}\n\n{"id": 2}\n')
    monkeypatch.setattr(texts, "open", open_piecemeal, raising=False)
    assert len(opened(tmp_path / "many")) == 80


def _anonymous() -> int:
    # Not the pages of files that are mapped: the system takes those back whenever it needs them.
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _peak_of(work: Callable[[], Any]) -> float:
    """The most memory that `work` held beyond what there was before, in MB."""
    before = _anonymous()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak.append(_anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return (max(peak) - before) / 1e6


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    line = json.dumps({"text": "y" * 2000}) + "\n"
    with open(tmp_path / "big.jsonl", "w") as file:
        for _ in range(100):
            file.write(line * 1000)
    assert (tmp_path / "big.jsonl").stat().st_size > 200e6
    choose = random.Random(0)

    def work() -> None:
        source = opened(tmp_path / "big.jsonl")
        for _ in range(10):
            source.rows(choose.choices(range(len(source)), k=500))

    assert _peak_of(work) < 40


@pytest.mark.slow
def test_memory_of_writing_and_reading_parquet(tmp_path: Path) -> None:
    # One row group of 200 MB: as bad as it gets.
    text = random.Random(0).randbytes(1000).hex()
    table = pa.table({"text": pa.array([f"{index} {text}" for index in range(100_000)])})
    pq.write_table(table, tmp_path / "big.parquet", row_group_size=100_000, use_dictionary=False)
    del table
    choose = random.Random(0)

    def work() -> None:
        source = opened(tmp_path / "big.parquet")
        for _ in range(10):
            source.rows(choose.choices(range(len(source)), k=500))

    assert _peak_of(work) < 100


@pytest.mark.slow
def test_ten_million_rows(tmp_path: Path) -> None:
    with open(tmp_path / "many.jsonl", "w") as file:
        for _ in range(1000):
            file.write('{"a": 1}\n' * 10_000)
    source = opened(tmp_path / "many.jsonl")
    assert len(source) == 10_000_000
    started = time.process_time()
    assert len(opened(tmp_path / "many.jsonl")) == 10_000_000
    assert time.process_time() - started < 0.1
    indices = random.Random(0).choices(range(len(source)), k=20_000)
    source.rows(indices[:10])
    started = time.process_time()
    source.rows(indices)
    assert (time.process_time() - started) / len(indices) < 200e-6
