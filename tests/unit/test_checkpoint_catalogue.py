"""Which checkpoints are found, trusted and kept."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint import storage as posix
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Keep, committed, directory_name, newest, to_remove
from raytune_fsdp.checkpoint.manifest import check_files, make_manifest, share_of
from raytune_fsdp.checkpoint.model_files import find_checkpoint
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.storage import PosixStorage
from raytune_fsdp.checkpoint.writing import Hashing, Sum, write_small
from raytune_fsdp.run.publish import checkpoints_to_average


def write(root: Path, step: int, attempt: int = 1, content: bytes = b"x" * 3_000_000) -> Path:
    storage = PosixStorage(str(root))
    draft = storage.draft(directory_name(step, attempt), 1)
    sums = {name: write_small(draft, name, content) for name in ("__0_1.distcp", "state.json", "tensors.json")}
    draft.publish({name: each.bytes for name, each in sums.items()}, make_manifest(sums))
    return root / directory_name(step, attempt)


def test_found_in_order_of_step_and_attempt(tmp_path: Path) -> None:
    for step, attempt in ((10, 1), (9, 2), (10, 11), (10, 2)):
        write(tmp_path, step, attempt, b"x")
    (tmp_path / "step-00000099.a1").mkdir()
    (tmp_path / "step-00000099.a1.1.tmp").mkdir()
    (tmp_path / "elsewhere").mkdir()
    assert [(f.step, f.attempt) for f in committed(str(tmp_path))] == [(9, 2), (10, 1), (10, 2), (10, 11)]
    assert committed(str(tmp_path / "not there")) == []


def test_ten_thousand_are_looked_through_in_no_time(tmp_path: Path) -> None:
    for step in range(10_000):
        directory = tmp_path / directory_name(step, 1)
        directory.mkdir()
        if step % 100 == 0:
            (directory / "manifest.json").touch()
    started = time.perf_counter()
    assert len(committed(str(tmp_path))) == 100
    assert time.perf_counter() - started < 2


def test_a_file_that_is_listed_late_is_waited_for(tmp_path: Path) -> None:
    """One of another node, on storage that keeps listings for a while."""
    storage = PosixStorage(str(tmp_path))
    draft = storage.draft("step-00000001.a1", 1)
    write_small(draft, "a", b"1234")
    threading.Timer(0.5, lambda: write_small(draft, "b", b"1")).start()
    draft.publish({"a": 4, "b": 1}, "{}")
    assert storage.names() == ["step-00000001.a1"]


def test_a_draft_is_published_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "_SEEN_SECONDS", 0.3)
    storage = PosixStorage(str(tmp_path))
    draft = storage.draft("step-00000001.a1", 1)
    write_small(draft, "a", b"1234")
    for sizes in ({"a": 5}, {"a": 4, "b": 1}, {}):
        with pytest.raises(OSError, match="but what was written there"):
            draft.publish(sizes, "{}")
    assert storage.names() == []
    with pytest.raises(FileExistsError):
        write_small(draft, "a", b"1234")
    draft.publish({"a": 4}, "{}")
    assert storage.names() == ["step-00000001.a1"]
    again = storage.draft("step-00000001.a1", 2)
    write_small(again, "a", b"other")
    with pytest.raises(OSError):
        again.publish({"a": 5}, "{}")
    assert (tmp_path / "step-00000001.a1" / "a").read_bytes() == b"1234", "what is there is never replaced"


def test_in_a_store_a_failed_save_takes_nothing_from_the_next_one_of_the_same_step(tmp_path: Path) -> None:
    """Other ranks write for that one already when rank 0 removes what the first has left."""
    storage = ObjectStorage(f"file://{tmp_path}")
    name = directory_name(7, 1)
    first, second = storage.draft(name, 1), storage.draft(name, 2)
    for file in ("__0_1.distcp", "__1_1.distcp", "tensors.json", "state.json"):
        (tmp_path / name).mkdir(exist_ok=True)
        write_small(first, file, b"first")
    sums = {"__1_2.distcp": write_small(second, "__1_2.distcp", b"second")}
    first.discard()
    assert storage.sizes(name) == {"__1_2.distcp": 6}
    sums |= {file: write_small(second, file, b"second") for file in ("__0_2.distcp", "tensors.json", "state.json")}
    second.publish({file: each.bytes for file, each in sums.items()}, make_manifest(sums))
    first.discard()
    assert [found.step for found in committed(storage.location)] == [7] and len(storage.sizes(name)) == 5


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: (p / "__0_1.distcp").unlink(), "__0_1.distcp is gone"),
        (lambda p: (p / "__0_1.distcp").write_bytes(b"x"), "has 1 bytes instead of 3000000"),
        (lambda p: (p / "__0_1.distcp").write_bytes(b"y" + b"x" * 2_999_999), "the content of __0_1.distcp"),
        (lambda p: (p / "state.json").write_bytes(b"x" * 2_999_999 + b"y"), "the content of state.json"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is not what was written"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is not what was written"),
    ],
)
def test_damage_is_seen_and_the_one_before_is_used(tmp_path: Path, harm: object, said: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    harm(path)  # type: ignore[operator]
    found, damaged = newest(str(tmp_path), hashes=True)
    assert found is not None and found.step == 1
    assert said in damaged[CommittedCheckpoint(2, 1, str(tmp_path))]
    write(tmp_path, 3)
    assert newest(str(tmp_path), hashes=True)[0] == CommittedCheckpoint(3, 1, str(tmp_path)), (
        "no further than necessary"
    )


def test_small_files_are_always_read(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert check_files(PosixStorage(str(tmp_path)), path.name, hashes=False) is None
    content = (path / "__0_1.distcp").read_bytes()
    (path / "__0_1.distcp").write_bytes(b"y" + content[1:])
    assert check_files(PosixStorage(str(tmp_path)), path.name, hashes=False) is None
    (path / "state.json").write_bytes(b"y" + content[1:])
    assert "state.json" in str(check_files(PosixStorage(str(tmp_path)), path.name, hashes=False))


def test_ranks_together_read_everything_once(tmp_path: Path) -> None:
    sizes = {"a": 50, "b": 30, "c": 30, "d": 1}
    shares = [share_of(sizes, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert shares[0] == ["a"]
    path = write(tmp_path, 1)
    (path / "__0_1.distcp").write_bytes(b"y" * 3_000_000)
    told = [check_files(PosixStorage(str(tmp_path)), path.name, hashes=True, share=(rank, 2)) for rank in range(2)]
    assert sum(problem is not None for problem in told) == 1


def test_a_run_all_of_whose_checkpoints_are_damaged_does_not_start_anew(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    path = write(tmp_path, 1)
    (path / "state.json").write_bytes(b"")
    with pytest.raises(ResumeError, match=r"every checkpoint is damaged \(step-00000001.a1: state.json has 0 bytes"):
        newest(str(tmp_path), hashes=True)
    storage.set_aside(path.name)
    # Not "move the directory away": the record still says that the run has saved, so that would be refused, too.
    with pytest.raises(ResumeError, match="they were set aside.*or start from scratch under another run.name$"):
        newest(str(tmp_path), hashes=True)


class Collected(AbstractBufferedFile):  # type: ignore[misc]
    """A file as fsspec's object stores have them: closing it, or collecting it, uploads what it has got."""

    def _initiate_upload(self) -> None:
        pass

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.buffer.seek(0)
            self.fs.objects[self.path] = self.buffer.read()
        return final


class Remembering(AbstractFileSystem):  # type: ignore[misc]
    """A store that remembers what it has listed, as those of fsspec do."""

    protocol = "remembering"
    objects: ClassVar[dict[str, bytes]] = {}
    listed: ClassVar[list[str]] = []

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Collected:
        return Collected(self, path, mode, **more)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()

    def isdir(self, path: str) -> bool:
        return True

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False, **_: Any) -> Any:
        if not self.listed:
            self.listed.extend(self.objects)
        return {name: {"name": name, "type": "file", "size": len(self.objects[name])} for name in self.listed}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    Remembering.objects.clear()
    Remembering.listed.clear()
    return ObjectStorage("remembering://store")


def test_what_a_failed_try_has_uploaded_does_not_replace_what_the_next_one_has(store: ObjectStorage) -> None:
    """torch.save's errors keep its file alive until the garbage collector comes by."""
    alive: list[Any] = []
    for content in (b"ha", b"half of it and the rest"):
        with contextlib.suppress(ConnectionError), store.create("step-00000001.a1", "__0_1.distcp") as sink:
            sink.write(memoryview(content))
            if not alive:
                alive.append(sink)
                raise ConnectionError("reset by peer")
    del sink
    alive.clear()
    gc.collect()
    assert store.sizes("step-00000001.a1") == {"__0_1.distcp": 23}


def test_what_other_processes_have_written_is_listed(store: ObjectStorage) -> None:
    store.put("step-00000001.a1", "manifest.json", b"{}")
    assert store.names() == ["step-00000001.a1"]
    Remembering.objects["store/step-00000002.a1/manifest.json"] = b"{}"
    assert sorted(store.names()) == ["step-00000001.a1", "step-00000002.a1"]


def test_the_url_of_a_run_may_end_with_a_slash(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    write(root, 3, content=b"x")
    for end in ("", "/", "//"):
        assert find_checkpoint(f"file://{tmp_path}/run{end}").path == f"file://{root}/step-00000003.a1"
        with pytest.raises(ResumeError, match="has only the checkpoint of step 3"):
            checkpoints_to_average(f"file://{tmp_path}/run{end}", steps=None, last=None)


def found(*steps: int) -> list[CommittedCheckpoint]:
    return [CommittedCheckpoint(step, 1, "r") for step in steps]


def removed(steps: list[int], keep: Keep, scores: dict[int, float] | None = None) -> list[int]:
    return [each.step for each in to_remove(found(*steps), keep, scores or {})]


def test_what_is_kept() -> None:
    steps = [2, 4, 6, 8, 10]
    assert removed(steps, Keep(last=None)) == []
    assert removed(steps, Keep(last=2)) == [2, 4, 6]
    assert removed(steps, Keep(last=1)) == [2, 4, 6], "two at least: the newest may turn out damaged"
    assert removed(steps, Keep(last=2, every=4)) == [2, 6]
    scores = {2: 0.5, 4: 0.1, 6: 0.1, 8: 0.9, 10: 0.3}
    assert removed(steps, Keep(last=2, best=1), scores) == [2, 4], "of equals the later"
    assert removed(steps, Keep(last=2, best=2), scores) == [2]
    assert removed(steps, Keep(last=2, best=2, lower_is_better=False), scores) == [4, 6]
    assert removed(steps, Keep(last=2, best=3), {4: 0.1}) == [2, 6], "what was not evaluated is not the best"


@given(
    st.lists(st.integers(1, 60), unique=True).map(sorted),
    st.integers(2, 4), st.none() | st.integers(1, 10), st.integers(0, 3),
    st.dictionaries(st.integers(1, 60), st.floats(0, 1)),
)  # fmt: skip
def test_the_newest_two_and_the_best_are_never_removed(
    steps: list[int], last: int, every: int | None, best: int, scores: dict[int, float]
) -> None:
    gone = removed(steps, Keep(last=last, every=every, best=best), scores)
    assert not set(gone) & set(steps[-2:])
    assert len(steps) - len(gone) >= min(2, len(steps))
    scored = [scores[step] for step in steps if step in scores]
    if best and scored:
        assert min(scored) in [scores[step] for step in steps if step in scores and step not in gone]


def test_removing_leaves_no_half_of_one(tmp_path: Path) -> None:
    """What a crash leaves of it is not taken for a checkpoint."""
    storage = PosixStorage(str(tmp_path))
    path = write(tmp_path, 1)
    path.rename(tmp_path / f"{path.name}.tmp")
    assert committed(str(tmp_path)) == []
    write(tmp_path, 2)
    storage.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002.a1"]


def test_set_aside_twice(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    for _ in range(2):
        write(tmp_path, 1)
        storage.set_aside("step-00000001.a1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001.a1.2.damaged", "step-00000001.a1.damaged"]


def test_the_hash_is_of_what_was_written() -> None:
    import xxhash

    class Sink:
        content = b""

        def write(self, piece: memoryview) -> None:
            self.content += bytes(piece)

    sink = Sink()
    target = Hashing(sink)
    pieces = [b"a", b"", bytes(range(256)) * 70_000]
    for piece in pieces:
        assert target.write(piece) == len(piece)
    assert sink.content == b"".join(pieces)
    assert target.sum == Sum(len(sink.content), xxhash.xxh3_128_hexdigest(sink.content))


def test_the_manifest_is_plain(tmp_path: Path) -> None:
    assert json.loads(make_manifest({"b": Sum(1, "aa"), "a": Sum(2, "bb")})) == {
        "format": 2,
        "files": {"a": {"bytes": 2, "xxh3": "bb"}, "b": {"bytes": 1, "xxh3": "aa"}},
    }
