"""Windows on storage: as they were built or not at all, by many writers, within a bound."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.cli.main import main
from raytune_fsdp.data import cache as cache_module
from raytune_fsdp.data.cache import REFERENCE, TEACHER, Window, WindowCache, entries, remove
from tests.ranks import run_ranks
from tests.rows import make_windows, token_rows

ABOUT = {"datasets": ["rows"]}


@pytest.fixture
def window(tmp_path: Path) -> Window:
    rows = [token_rows(tmp_path, [3, 9, 16, 5, 7, 16, 2, 2])]
    return make_windows(rows, cache=tmp_path / "elsewhere", seq_len=21, bad_rows="skip").get(0, 0)[0]


@pytest.fixture
def cache(tmp_path: Path) -> WindowCache:
    return WindowCache(tmp_path / "cache", "f" * 32, 10**9, ABOUT)


def equal(left: Window, right: Window) -> bool:
    pairs = [(getattr(left.samples, name), getattr(right.samples, name)) for name in left.samples.__dataclass_fields__]
    return left.counts == right.counts and all(
        a is b is None or a.dtype == b.dtype and a.shape == b.shape and (np.asarray(a) == np.asarray(b)).all()
        for a, b in pairs
    )


def test_comes_back_as_it_was(cache: WindowCache, window: Window) -> None:
    assert cache.read(0, 3) is None
    cache.write(0, 3, window)
    read = cache.read(0, 3)
    assert read is not None and equal(read, window)
    assert [s.id for s in read.samples] == [s.id for s in window.samples]
    assert cache.read(1, 3) is None and cache.read(0, 2) is None


@pytest.mark.slow
def test_windows_are_written_and_read_without_pandas(tmp_path: Path) -> None:
    """Importing it takes a process about a second, in which nothing can be trained."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.rows import make_windows, token_rows\n"
        "directory = Path(sys.argv[1])\nrows = [token_rows(directory, [3, 9, 16])]\n"
        "for _ in range(2):\n    make_windows(rows, cache=directory / 'cache', seq_len=21).get(0, 0)\n"
        "assert 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_damage_is_found_and_the_file_removed(cache: WindowCache, window: Window) -> None:
    cache.write(0, 0, window)
    (path,) = cache.directory.glob("*.arrow")
    good = path.read_bytes()
    generator = random.Random(0)
    for trial in range(300):
        if trial % 3:
            bad = bytearray(good)
            bad[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        else:
            bad = bytearray(good[: generator.randrange(len(good))])
        path.write_bytes(bad)
        assert cache.read(0, 0) is None
        assert not path.exists()


def test_a_window_file_is_refused_in_another_place(cache: WindowCache, window: Window) -> None:
    other = WindowCache(cache.root, "e" * 32, 10**9, ABOUT)
    for place, epoch, k in ((cache, 0, 1), (cache, 1, 0), (other, 0, 0)):
        cache.write(0, 0, window)
        (file,) = cache.directory.glob("e000-w00000000.arrow")
        target = place._path(epoch, k)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file.read_bytes())
        assert place.read(epoch, k) is None and not target.exists()
        assert cache.read(0, 0) is not None


def test_a_window_file_without_its_place_must_have_the_shape_that_is_wanted(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [5] * 20)]
    windows = make_windows(rows, cache=tmp_path)
    for k in range(3):  # files as an older tree has written them
        body, digest = windows.get(0, k)[0].to_bytes({})
        windows.cache._path(0, k).write_bytes(bytes(body) + digest)
    again = make_windows(rows, cache=tmp_path)
    assert [again.get(0, k)[1] for k in range(3)] == [False, False, False]
    whole, short = windows.cache._path(0, 0), windows.cache._path(0, 2)
    whole.write_bytes(short.read_bytes())  # 4 rows where there must be 8
    assert make_windows(rows, cache=tmp_path).get(0, 0)[1] is True
    longer = make_windows(rows, cache=tmp_path / "longer", seq_len=20)
    longer.get(0, 0)
    body, digest = longer.get(0, 0)[0].to_bytes({})
    whole.write_bytes(bytes(body) + digest)
    assert make_windows(rows, cache=tmp_path).get(0, 0)[1] is True


def test_damaged_window_is_built_again(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [5] * 20)]
    first = make_windows(rows, cache=tmp_path)
    expected = [first.get(0, k)[0].samples.ids.tolist() for k in range(3)]
    path = sorted(first.cache.directory.glob("*.arrow"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    again = make_windows(rows, cache=tmp_path)
    results = [again.get(0, k) for k in range(3)]
    assert [built for _, built in results] == [False, True, False]
    assert [window.samples.ids.tolist() for window, _ in results] == expected
    assert make_windows(rows, cache=tmp_path).get(0, 1)[1] is False


def test_many_writers_and_readers(cache: WindowCache, window: Window) -> None:
    def work(number: int) -> bool:
        cache.write(0, number % 3, window)
        read = cache.read(0, number % 3)
        return read is not None and equal(read, window)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(120)))
    assert sorted(path.suffix for path in cache.directory.iterdir()) == [".arrow", ".arrow", ".arrow", ".json"]


def test_one_builds_at_a_time_but_nobody_waits_for_ever(cache: WindowCache, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def work(name: str, k: int) -> None:
        with cache.building(0, k):
            order.append(f"{name} begins")
            time.sleep(0.3)
            order.append(f"{name} ends")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, ("a", "b"), (7, 7)))
    assert [word.split()[1] for word in order] == ["begins", "ends"] * 2
    both = threading.Barrier(2)

    def meet(k: int) -> None:
        with cache.building(0, k):
            both.wait(30)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, (7, 23)))
    monkeypatch.setattr(cache_module, "_LOCK_SECONDS", 0.2)
    with cache.building(0, 7):
        work("impatient", 7)


def test_a_clean_up_at_any_moment_is_survived(
    cache: WindowCache, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cache_module.replace_at_once

    def first_clean_up(path: Path, *parts: bytes) -> None:
        if path.suffix == ".arrow" and cache.directory.exists():
            monkeypatch.setattr(cache_module, "replace_at_once", write)
            remove(cache.root)
            assert not cache.directory.exists()
        write(path, *parts)

    monkeypatch.setattr(cache_module, "replace_at_once", first_clean_up)
    cache.write(0, 0, window)
    assert cache.read(0, 0) is not None and (cache.directory / "about.json").exists()


def fill_the_disk(directory: str) -> tuple[str, list[str], bool]:
    """Census and stream in a process that may write no file of more than 4 kB."""
    import resource

    from raytune_fsdp.data.census import census

    rows = [token_rows(Path(directory), [300] * 20)]
    windows = make_windows(rows, cache=Path(directory) / "cache", seq_len=300)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        census(windows)
        message = ""
    except DataError as error:
        message = str(error)
    left = [path.name for path in windows.cache.directory.iterdir() if path.name != "locks"]
    window, built = windows.get(0, 1)  # while training, the run goes on without a cache
    return message, left, built and len(window.samples) > 0


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    ((message, left, goes_on),) = run_ranks(fill_the_disk, 1, str(tmp_path))
    assert re.search(r"the cache .* cannot take another .* MB \(File too large\); free space, .*data clean", message)
    assert left == ["about.json"] and goes_on


def test_stays_within_its_bound(tmp_path: Path, window: Window) -> None:
    cache = WindowCache(tmp_path, "a" * 32, 10**9, ABOUT)
    size = window.to_bytes(cache._place(0, 0))[0].size + 16
    cache.max_bytes = 10 * size
    for k in range(40):
        cache.write(0, k, window)
        for path in cache.directory.glob("*.arrow"):
            stamp = 1_000_000 + int(path.stem[-8:])
            os.utime(path, (stamp, stamp))
    kept = sorted(int(path.stem[-8:]) for path in cache.directory.glob("*.arrow"))
    assert 8 <= len(kept) <= 10 and kept == list(range(40 - len(kept), 40))


@pytest.mark.parametrize("what", [REFERENCE, TEACHER])
def test_what_other_models_have_said_pushes_no_window_out(tmp_path: Path, window: Window, what: str) -> None:
    """A teacher's predictions may be larger than the limit, and are no windows' business."""
    said = tmp_path / what / ("a" * 32)
    said.mkdir(parents=True)
    (said / "about.json").write_text(json.dumps({what: "1234-5678"}))
    (said / "values").write_bytes(bytes(1 << 20))
    assert [entry.path for entry in entries(tmp_path)] == [said]
    for number, fingerprint in enumerate(("f" * 32, "e" * 32)):
        WindowCache(tmp_path, fingerprint, 1 << 20, ABOUT).write(0, number, window)
    assert len(list(tmp_path.glob("*/*.arrow"))) == 2 and said.exists()


def test_what_another_user_has_written_stays_and_nobody_fails(
    tmp_path: Path, window: Window, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = WindowCache(tmp_path / "c", "a" * 32, 10**9, ABOUT), WindowCache(tmp_path / "c", "b" * 32, 0, ABOUT)
    for k in range(3):
        theirs.write(0, k, window)
    prepared = ours.root / "files" / ("c" * 32)
    prepared.mkdir(parents=True)
    (prepared / "meta.json").write_text('{"identity": {}}')
    kept = sorted([*theirs.directory.iterdir(), *prepared.iterdir()])
    for path in kept:
        os.utime(path, (1, 1))
    unlink = os.unlink

    def refused(path: str | Path, **more: Any) -> None:
        if Path(path).parent == theirs.directory or Path(path).name == "meta.json":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refused)
    for k in range(2):  # the cache is full, and stays so
        ours.write(0, k, window)
        assert ours.read(0, k) is not None
    assert [entry.path.parent for entry in remove(ours.root)] == [ours.directory]
    assert sorted([*theirs.directory.iterdir(), *prepared.iterdir()]) == kept
    assert main(["data", "clean", str(ours.root)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("removed 0 prepared files and windows, 0.00 MB; left 0.0") and "4 could not be" in said


def test_two_clean_ups_at_once_do_not_disturb_each_other(
    cache: WindowCache, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lists a directory, and finds it gone when it looks into it."""
    cache.write(0, 0, window)
    gone = cache.root / ("e" * 32)
    monkeypatch.setattr(cache_module, "_window_directories", lambda _: [gone, cache.directory])
    assert [entry.path.parent for entry in entries(cache.root)] == [cache.directory]
    assert len(remove(cache.root)) == 1 and not cache.directory.exists()
    cache.max_bytes = 0
    cache.write(0, 0, window)


def test_what_another_user_reads_is_in_use(cache: WindowCache, window: Window) -> None:
    """Their process may not set the time of the last change, so that of the last reading counts, too."""
    prepared = cache.root / "files" / ("c" * 32)
    prepared.mkdir(parents=True)
    (prepared / "meta.json").write_text('{"identity": {}}')
    (prepared / "rows.arrow").write_bytes(b"rows")
    cache.write(0, 0, window)
    for path in (cache._path(0, 0), prepared / "rows.arrow", prepared / "meta.json"):
        os.utime(path, (time.time(), 1))
    assert remove(cache.root, unused_for=3600) == []
    os.utime(prepared / "rows.arrow", (1, 1))  # meta.json is read by every clean-up
    assert [entry.path for entry in remove(cache.root, unused_for=3600)] == [prepared]


def test_clean_up_takes_what_was_unused_for_longest(tmp_path: Path, window: Window) -> None:
    old, new = WindowCache(tmp_path, "a" * 32, 10**9, ABOUT), WindowCache(tmp_path, "b" * 32, 10**9, ABOUT)
    for k in range(3):
        old.write(0, k, window)
        new.write(0, k, window)
    prepared = tmp_path / "files" / ("c" * 32)
    prepared.mkdir(parents=True)
    (prepared / "rows.arrow").write_bytes(b"x" * 1000)
    (prepared / "meta.json").write_text('{"identity": {}}')
    (making := tmp_path / "files" / f"{'d' * 32}.1234.tmp").mkdir()
    (making / "rows.arrow").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("not of the cache")
    mine = [tmp_path / "mine", tmp_path / "files" / "photos", tmp_path / ("e" * 32), tmp_path / "files" / ("f" * 32)]
    for directory in mine:
        directory.mkdir()
        (directory / "notes.arrow").write_text("not of the cache either")
        (directory / "about.json").write_text("{}")
        os.utime(directory / "notes.arrow", (1, 1))
    (half := new.directory / "e000-w00000009.arrow.1234.tmp").write_bytes(b"half")
    for path in [*old.directory.glob("*.arrow"), *prepared.iterdir()]:
        os.utime(path, (1, 1))
    assert len(list(entries(tmp_path))) == 7
    removed = remove(tmp_path, unused_for=3600)
    assert len(removed) == 4 and not old.directory.exists() and not prepared.exists()
    assert len(list(new.directory.glob("*.arrow"))) == 3 and half.exists() and making.exists()
    for path in (half, making / "rows.arrow"):
        os.utime(path, (time.time() - cache_module.ABANDONED_SECONDS - 9,) * 2)
    remove(tmp_path)
    assert all((directory / "notes.arrow").exists() for directory in mine) and (tmp_path / "mine.txt").exists()
    left = {path.name for directory in (tmp_path, tmp_path / "files") for path in directory.iterdir()}
    assert left == {"elsewhere", "rows.jsonl", "files", "mine.txt", *(directory.name for directory in mine)}
