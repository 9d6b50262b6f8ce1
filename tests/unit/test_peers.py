"""Peer copies: what is kept in the memory of nodes, and what is never taken for a copy."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.measured import Saved
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.base.untrusted import UnsoundError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed, verify
from raytune_fsdp.checkpoint.location import hold, in_memory, new_location, storage_at
from raytune_fsdp.checkpoint.manifest import check_files, make_manifest
from raytune_fsdp.checkpoint.peers import clock
from raytune_fsdp.checkpoint.peers import storage as peers
from raytune_fsdp.checkpoint.peers.keeper import Keeper
from raytune_fsdp.checkpoint.peers.storage import KeepersHere, PeerStorage, copies_of
from raytune_fsdp.checkpoint.save_in_flight import Outcome
from raytune_fsdp.checkpoint.storage import PosixStorage, directory_name
from raytune_fsdp.checkpoint.writing import Sum, write_small
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.worker import alone, work
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.host import PeerNeeds, host_needs
from raytune_fsdp.predict.page.text import as_page
from raytune_fsdp.predict.planned import Planned
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_events, read_trajectory, steps_after
from raytune_fsdp.run.assemble import LauncherHooks
from raytune_fsdp.run.open_record import run_start
from raytune_fsdp.run.peers.copies import PeerCopies
from raytune_fsdp.run.peers.going_on import look_with_peers, with_peers
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume_point import agree
from raytune_fsdp.run.saving import lost_seconds, uncommitted_seconds
from tests import clock as clocks
from tests.runs import GPT2, make_config

CPU = torch.device("cpu")
SMALL = {**GPT2, "n_layer": 1}
NAMES = ("a", "b", "c")


def name_of(step: int, attempt: int = 1) -> str:
    return directory_name(step, attempt, lasting=False)


class Nodes:
    """A keeper on each node, and a rank on each that reaches all of them."""

    def __init__(self, nodes: Sequence[str] = NAMES, count: int = 1) -> None:
        self.keepers = {node: Keeper() for node in nodes}
        self.here = KeepersHere(self.keepers)
        self.location = new_location()
        self.ranks = [PeerStorage(self.location, self.here, nodes, own=node, count=count) for node in nodes]

    def write(self, step: int, attempt: int = 1, size: int = 30_000, *, files: bool = True) -> dict[str, Sum]:
        """All that a save writes but the manifest. Every rank's file has other bytes."""
        sums, name = {}, name_of(step, attempt)
        for rank, storage in enumerate(self.ranks):
            content = random.Random(f"{step} {attempt} {rank}").randbytes(size)
            file = f"__{rank}_1.distcp"
            sums[file] = write_small(storage.draft(name, 1), file, content)
        for file in ("state.json", "tensors.json"):
            sums[file] = write_small(self.ranks[0].draft(name, 1), file, file.encode())
        return sums

    def save(self, step: int, attempt: int = 1, size: int = 30_000) -> str:
        sums, name = self.write(step, attempt, size), name_of(step, attempt)
        draft = self.ranks[0].draft(name, 1)
        draft.publish({file: each.bytes for file, each in sums.items()}, make_manifest(sums))
        return name

    def lose(self, node: str) -> None:
        del self.here.keepers[node]


def test_a_copy_is_found_whole_and_in_parts_like_any_checkpoint() -> None:
    cluster = Nodes()
    name = cluster.save(7, size=9 << 20)
    storage = cluster.ranks[1]
    assert storage.names() == [name]
    pieces = {f"__{rank}_1.distcp" for rank in range(3)}
    assert storage.sizes(name).keys() == pieces | {"state.json", "tensors.json", "manifest.json"}
    shares = [check_files(storage, name, hashes=True, share=(rank, 3)) for rank, storage in enumerate(cluster.ranks)]
    assert shares == [None] * 3
    content, chance = random.Random("7 1 2").randbytes(9 << 20), random.Random(1)
    with storage.open(name, "__2_1.distcp") as source:
        for offset, size in [(chance.randrange(9 << 20), chance.choice((0, 1, 60_000, 5 << 20))) for _ in range(60)]:
            target = bytearray(size)
            if offset + size > len(content):
                with pytest.raises(OSError):
                    source.read_into(offset, memoryview(target))
            else:
                source.read_into(offset, memoryview(target))
                assert target == content[offset : offset + size]
    assert storage.read(name, "state.json", 10) == b"state.json"
    with pytest.raises(UnsoundError, match="10 bytes, more than the 9"):
        storage.read(name, "state.json", 9)
    with pytest.raises(FileNotFoundError):
        storage.read(name, "gone.json", 10)


def test_storage_finds_copies_only_by_their_own_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of any name is one, and a command sees no other's copies."""
    cluster = Nodes()
    name = cluster.save(3)
    with pytest.raises(FileNotFoundError, match="only known to the ranks"):
        storage_at(cluster.location)
    hold(cluster.ranks[0])
    assert committed(cluster.location) == [CommittedCheckpoint(3, 1, cluster.location, lasting=False)]
    assert verify(committed(cluster.location)[0], hashes=True) is None
    monkeypatch.chdir(tmp_path)
    for directory in ("peers:", "peers:3", f"./{cluster.location}", str(tmp_path / cluster.location)):
        assert not in_memory(directory) and isinstance(storage_at(directory), PosixStorage)
    assert new_location() != cluster.location
    assert cluster.ranks[0].where(name) == f"{cluster.location}/{name}"


@pytest.mark.parametrize("lost", NAMES)
def test_one_lost_node_never_takes_a_copy(lost: str) -> None:
    cluster = Nodes()
    name = cluster.save(7)
    cluster.lose(lost)
    for storage in cluster.ranks:
        assert storage.names() == [name] and check_files(storage, name, hashes=True) is None


def test_two_lost_nodes_take_it_unless_there_are_more_copies() -> None:
    for count, problem in ((1, "__1_1.distcp is gone"), (2, None)):
        cluster = Nodes(count=count)
        name = cluster.save(7)
        cluster.lose("b")
        cluster.lose("c")
        storage = cluster.ranks[0]
        assert storage.names() == [name]
        found = check_files(storage, name, hashes=True)
        assert (found is None) if problem is None else (found is not None and found.startswith(problem)), found


def test_where_copies_are() -> None:
    assert copies_of("b", NAMES, 1) == ["b", "c"] and copies_of("c", NAMES, 1) == ["c", "a"]
    assert copies_of("a", ["a"], 1) == ["a"], "only its own: it survives a rank, not the node"
    assert copies_of("a", ["b", "a"], 5) == ["a", "b"]


def test_a_keeper_that_is_lost_while_it_is_read_is_replaced_by_another() -> None:
    cluster = Nodes()
    name = cluster.save(7)
    storage = cluster.ranks[0]
    storage.sizes(name)
    cluster.lose("a")
    assert storage.read(name, "state.json", 99) == b"state.json"
    cluster.lose("b")
    with storage.open(name, "__0_1.distcp") as source, pytest.raises(FileNotFoundError, match="no node has"):
        source.read_into(0, memoryview(bytearray(10)))
    assert "is gone" in str(check_files(storage, name, hashes=True))


Plant = Callable[[Nodes, str], object]
PLANTED: list[Plant] = [
    lambda cluster, name: cluster.keepers["a"].write(name, "__0_1.distcp", 0, b"half"),
    lambda cluster, name: cluster.write(9, 2),
    lambda cluster, name: cluster.keepers["a"].write(name, "manifest.json", 0, b"{}"),
]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_not_sealed_with_its_manifest_is_no_copy(plant: Plant) -> None:
    cluster = Nodes()
    whole = cluster.save(7)
    plant(cluster, name_of(9, 2))
    for storage in cluster.ranks:
        assert storage.names() == [whole] and check_files(storage, whole, hashes=True) is None


def test_a_file_is_sealed_only_as_it_was_sent() -> None:
    content = random.Random(4).randbytes(1000)
    name, right = name_of(4), xxhash.xxh3_128_hexdigest(content)
    for pieces, size, sealed in (
        ([(500, content[500:]), (0, content[:500])], 1000, True),  # in any order
        ([(0, content[:500])], 1000, False),
        ([(0, content[:500]), (501, content[501:])], 1000, False),
        ([(0, content), (1000, b"x")], 1000, False),
        ([(0, content[:999] + b"x")], 1000, False),
        ([(0, content), (500, content[500:])], 1000, False),
    ):
        keeper = Keeper()
        for offset, piece in pieces:
            keeper.write(name, "f", offset, piece)
        assert keeper.held() == {}
        if sealed:
            keeper.seal(name, "f", size, right)
            assert keeper.held() == {name: {"f": 1000}}
            with pytest.raises(OSError, match="whole already"):
                keeper.write(name, "f", 0, b"x")
        else:
            with pytest.raises(OSError, match="has not come whole"):
                keeper.seal(name, "f", size, right)
            assert keeper.held() == {} and keeper.nbytes() == 0
            with pytest.raises(FileNotFoundError):
                keeper.read(name, "f", 0, 1)


def test_a_copy_is_published_only_with_every_file() -> None:
    cluster = Nodes()
    sums = cluster.write(5)
    sizes = {file: each.bytes for file, each in sums.items()}
    draft = cluster.ranks[0].draft(name_of(5), 1)
    for wrong in ({**sizes, "more": 1}, {**sizes, "state.json": 9}, {"state.json": 10}):
        with pytest.raises(OSError, match="but what was sent there is"):
            draft.publish(wrong, make_manifest(sums))
    assert cluster.ranks[0].names() == []

    def taken_over() -> None:
        raise OSError("another command")

    with pytest.raises(OSError, match="another command"):
        draft.publish(sizes, make_manifest(sums), taken_over)
    assert cluster.ranks[0].names() == []
    draft.publish(sizes, make_manifest(sums))
    assert cluster.ranks[0].names() == [name_of(5)]


def test_memory_holds_the_newest_whole_copy_and_the_one_that_is_written() -> None:
    cluster = Nodes()
    size = {node: keeper.nbytes() for node, keeper in cluster.keepers.items()}
    for step in range(5, 9):
        cluster.save(step)
        size = {node: keeper.nbytes() for node, keeper in cluster.keepers.items()}
        assert cluster.ranks[0].names() == [name_of(step)]
        assert all(60_000 < each < 61_000 for each in size.values()), "its own file, and one of another node"
    for step in (9, 10, 11):  # none of them becomes whole
        cluster.write(step)
        assert all(keeper.held().keys() == {name_of(8), name_of(step)} for keeper in cluster.keepers.values())
    cluster.ranks[0].draft(name_of(11), 1).discard()
    assert {node: keeper.nbytes() for node, keeper in cluster.keepers.items()} == size
    with pytest.raises(OSError, match="was given up"):
        cluster.keepers["a"].write(name_of(11), "__0_1.distcp", 0, b"late")


def test_a_manifest_that_reached_one_node_only_is_enough() -> None:
    """The others still have the copy before it, too; whatever is lost then, one of them is whole."""
    for lost in NAMES:
        cluster = Nodes()
        before = cluster.save(5)
        manifest = make_manifest(cluster.write(6)).encode()
        name = name_of(6)
        cluster.keepers["b"].write(name, "manifest.json", 0, manifest)
        cluster.keepers["b"].seal(name, "manifest.json", len(manifest), xxhash.xxh3_128_hexdigest(manifest))
        cluster.lose(lost)
        storage = cluster.ranks[0]
        newest = max(committed_in(storage))
        assert newest == (before if lost == "b" else name)
        assert check_files(storage, newest, hashes=True) is None


def test_a_node_that_is_lost_as_the_manifest_comes_does_not_take_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes that have it have forgotten the copy before. Where none has, that one stays."""
    for lost, left in (("a", 5), ("b", 6), ("c", 6)):
        cluster = Nodes()
        cluster.save(5)
        sums, draft = cluster.write(6), cluster.ranks[0].draft(name_of(6), 1)
        sizes = {file: each.bytes for file, each in sums.items()}

        def seal(*args: Any, keepers: KeepersHere = cluster.here, node: str = lost) -> None:
            keepers.keepers.pop(node, None)  # it has taken what is in it
            KeepersHere.seal(keepers, *args)

        with monkeypatch.context() as patch:
            patch.setattr(cluster.here, "seal", seal)
            try:
                draft.publish(sizes, make_manifest(sums))
            except OSError:
                draft.discard()
        assert max(committed_in(cluster.ranks[0])) == name_of(left), lost
        assert check_files(cluster.ranks[0], name_of(left), hashes=True) is None


def committed_in(storage: PeerStorage) -> list[str]:
    return sorted(storage.names())


def test_what_a_dead_attempt_has_sent_comes_too_late() -> None:
    cluster = Nodes()
    cluster.save(20, attempt=1)
    name = cluster.save(12, attempt=2)
    for step, attempt in ((21, 1), (11, 2)):
        with pytest.raises(OSError, match="is older than what is kept"):
            cluster.keepers["a"].write(name_of(step, attempt), "__0_1.distcp", 0, b"late")
    cluster.ranks[0].forget(2, but=None)  # what attempt 2 said when it began
    assert cluster.ranks[0].names() == [name]
    cluster.ranks[0].forget(3, but=name)
    assert cluster.ranks[0].names() == [name], "the one that attempt 3 has begun from"
    cluster.ranks[0].forget(3, but=None)
    assert cluster.ranks[0].names() == [] and not any(keeper.nbytes() for keeper in cluster.keepers.values())
    with pytest.raises(OSError, match="is not the name of a checkpoint"):
        cluster.keepers["a"].write("../x", "f", 0, b"")


def test_a_node_that_is_gone_fails_a_copy_and_leaves_the_one_before() -> None:
    cluster = Nodes()
    name = cluster.save(5)
    cluster.lose("b")
    with pytest.raises(OSError, match="the keeper of b is gone"):
        cluster.write(6)
    cluster.ranks[0].draft(name_of(6), 1).discard()
    assert cluster.ranks[0].names() == [name] and check_files(cluster.ranks[0], name, hashes=True) is None


def test_a_copy_is_given_up_where_its_attempt_ends() -> None:
    """The last checkpoint would wait for it, and a node's notice may be 30 s."""
    cluster = Nodes()
    name = cluster.save(5)
    for storage in cluster.ranks:
        storage.give_up()
    with pytest.raises(OSError, match="it was given up, as the attempt ends"):
        cluster.write(6)
    cluster.ranks[0].draft(name_of(6), 1).discard()
    assert cluster.ranks[0].names() == [name] and check_files(cluster.ranks[0], name, hashes=True) is None


class Stopped:
    """A keeper as Ray reaches it. Its process is stopped as one of these calls comes, and answers none after that."""

    def __init__(self, keeper: Keeper, at: str) -> None:
        self._keeper, self._at, self._stopped = keeper, at, False

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Future[Any]:
            self._stopped |= name == self._at
            call: Future[Any] = Future()
            if not self._stopped:
                call.set_result(getattr(self._keeper, name)(*given))
            return call

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize(("at", "size"), [("write", 9 << 20), ("write", 3000), ("seal", 3000), ("drop", 3000)])
def test_a_keeper_that_is_stopped_does_not_keep_the_last_checkpoint(
    at: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.exceptions import GetTimeoutError

    from raytune_fsdp.launch.ray import keepers as module

    def get(calls: list[Future[Any]], timeout: float) -> Any:
        if futures.wait(calls, timeout).not_done:
            raise GetTimeoutError
        return [each.result() for each in calls]

    def wait(calls: list[Future[Any]], num_returns: int, timeout: float) -> Any:
        return list(map(list, futures.wait(calls, timeout)))

    given = SimpleNamespace(get=get, wait=wait, put=lambda piece: piece.data)
    monkeypatch.setattr(module, "ray", given)
    held = {node: Keeper() for node in NAMES}
    actors = {node: Stopped(keeper, at if node == "b" else "") for node, keeper in held.items()}
    given_up = threading.Event()
    reached = module.KeepersOnRay(actors, NAMES, given_up)
    storage = PeerStorage("peers:1", reached, NAMES, own="a", count=1, given_up=given_up)
    draft = storage.draft(name_of(5), 1)
    began = monotonic()
    written = in_thread(lambda: write_small(draft, "__0_1.distcp", bytes(size)), "save")
    if at == "drop":
        written.result(5)
    else:
        with pytest.raises(LateError):
            written.result(0.1)
    storage.give_up()
    if at != "drop":
        with pytest.raises(OSError, match="had not answered when the attempt ended|it was given up"):
            written.result(5)
    draft.discard()
    assert monotonic() - began < 5
    assert not held["a"].nbytes() and not held["c"].nbytes()


def test_a_node_that_has_no_ranks_any_more_forgets_its_part_with_the_next_copy() -> None:
    cluster = Nodes()
    first = cluster.save(5)
    cluster.ranks = [PeerStorage(cluster.location, cluster.here, "ab", own=node, count=1) for node in "ab"]
    cluster.ranks[0].forget(2, but=first)
    assert cluster.keepers["c"].nbytes() > 30_000
    second = cluster.save(8, attempt=2)
    assert not cluster.keepers["c"].nbytes() and cluster.ranks[0].names() == [second]
    assert check_files(cluster.ranks[0], second, hashes=True) is None


def test_rows_are_sent_in_pieces_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch writes a piece of a hundred bytes in ten parts: none of them travels alone."""
    monkeypatch.setattr(peers, "_PIECE_BYTES", 1000)
    cluster = Nodes()
    sent: list[int] = []
    write = cluster.keepers["a"].write
    cluster.keepers["a"].write = lambda n, f, o, piece: (sent.append(len(piece)), write(n, f, o, piece))[1]  # type: ignore[assignment,func-returns-value,method-assign]
    with cluster.ranks[0].draft(name_of(1), 1).create("__0_1.distcp") as sink:
        for size in (1, 10, 500, 2600, 0, 300):
            sink.write(memoryview(bytes(size)))
    assert sent == [1000, 1000, 1000, 411]
    assert cluster.keepers["a"].held() == {name_of(1): {"__0_1.distcp": 3411}}
    with cluster.ranks[0].draft(name_of(1), 1).create("empty") as sink:
        pass
    assert cluster.keepers["c"].held()[name_of(1)]["empty"] == 0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> clocks.Clock:
    found = clocks.Clock()
    monkeypatch.setattr(clock, "time", found)
    return found


@pytest.mark.parametrize(("hold", "slower"), [(0.0, 0.0), (0.5, 0.0), (0.1, 0.3), (3.0, 2.0)])
def test_copies_take_two_percent_of_the_time_at_most(time: clocks.Clock, hold: float, slower: float) -> None:
    """Each holds training up for a moment, and makes the four steps after that slower."""
    copies, left, taken, at = clock.CopyClock(), 0, 0.0, []
    while time.now < 10_000:
        due = copies.due(busy=left > 0)
        if left == 1:
            copies.ended(4 * (1.0 + slower))
        left = max(0, left - 1)
        time.now += 1.0 + (slower if left else 0.0)
        taken += slower if left else 0.0
        if due:
            at.append(time.now)
            copies.begins()
            time.now += hold
            taken += hold
            copies.held()
            left = 4
    assert taken <= 0.025 * time.now, "the first ones come before anything is known"
    pauses = [b - a for a, b in itertools.pairwise(at)]
    assert min(pauses) >= 5.0 and max(pauses[2:]) <= max(10.0, 1.3 * (hold + 4 * slower) / 0.015)


def test_what_is_not_the_doing_of_a_copy_does_not_count(time: clocks.Clock) -> None:
    """An evaluation of ten minutes while one is written; other saves; and one that fails is tried again in a minute."""
    copies = clock.CopyClock()

    def step(seconds: float = 1.0, busy: bool = False) -> bool:
        time.now += seconds
        return copies.due(busy=busy)

    assert [step() for _ in range(4)] == [False, False, True, True]
    copies.begins()
    copies.held()
    assert not step(600.0), "nobody knows yet what this one has taken"
    copies.ended(0.05)
    assert [step() for _ in range(3)] == [True, True, True]
    copies.begins()
    copies.held()
    copies.ended(None)
    due = [step(busy=number < 3) for number in range(70)]
    assert due.index(True) == 59


def test_the_first_copy_that_training_waits_for_counts(time: clocks.Clock) -> None:
    """Without asynchronous saves a copy has ended before training goes on."""
    copies, begun = clock.CopyClock(), []
    for step in range(400):
        time.now += 1.0
        if copies.due(busy=False):
            begun.append(step)
            copies.begins()
            time.now += 3.0
            copies.ended(3.0)
            copies.held()
    assert begun == [2, 199, 396], "3 s of every 200"


def copied(
    config: FinetuneConfig, storage: PeerStorage, crash_at: int | None = None, passing: clocks.Clock | None = None
) -> tuple[list[int], list[tuple[int, bool]]]:
    """The steps of which copies were begun in a run on one rank, and what was saved: its step, and whether the clock
    asked."""
    prepared, standing = prepare(config, 1)
    begun: list[int] = []
    steps = itertools.count(1)
    draft = storage.draft

    def drafted(name: str, serial: int) -> peers.PeerDraft:
        begun.append(int(name[5:13]))
        return draft(name, serial)

    def stop() -> None:
        if passing is not None:
            passing.now += 10.0
        for thread in threading.enumerate():
            if thread.name.startswith("save-"):
                thread.join()
        if next(steps) == crash_at:
            raise RuntimeError("a bug")

    storage.draft = drafted  # type: ignore[method-assign]
    hold(storage)
    with alone(CPU):
        looked = agree(config, prepared, lambda: with_peers(config, prepared, standing, storage))
        work(config, prepared, looked, CPU, stop, LauncherHooks(peers=storage))
    events = [each for each in read_events(prepared.place.events) if each["event"] in (names.SAVED, names.SAVE_FAILED)]
    return begun, [(each["fields"]["step"], each["fields"].get("recovery", False)) for each in events]


EVERY = {"every": 4, "peer_copies": 1, "peer_every": 3}


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_copy_is_no_checkpoint_and_gives_way_to_one(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At step 12 both are due; where keepers are gone, training goes on, and some of the next copies are left out."""
    train: dict[str, Any] = {"train": {"global_batch": 4, "max_steps": 14}, "parallel": {"precision": "fp32"}}
    config = make_config(tmp_path, SMALL, **train, checkpoint={**EVERY, "asynchronous": asynchronous})
    cluster = Nodes(["a", "b"])
    assert copied(config, cluster.ranks[0]) == ([3, 6, 9], [(4, False), (8, False), (12, False), (14, False)])
    assert cluster.ranks[0].names() == [name_of(9)] and not caplog.records
    place = RunDir.of(config)
    assert [each.step for each in committed(place.checkpoints)] == [12, 14]
    gone = make_config(
        tmp_path, SMALL, run={"name": "gone"}, **train, checkpoint={**EVERY, "asynchronous": asynchronous}
    )
    cluster = Nodes(["a", "b"])
    cluster.lose("b")
    assert copied(gone, cluster.ranks[0]) == ([3, 9], [(4, False), (8, False), (12, False), (14, False)])
    assert "there is no peer copy of step 3: rank 0: OSError: the keeper of b is gone" in caplog.text
    assert read_trajectory(place.metrics) == read_trajectory(RunDir.of(gone).metrics)


@pytest.mark.parametrize(
    ("asynchronous", "lost", "expected"),
    [(True, False, [3, 5, 7, 9, 11, 13]), (False, False, [*range(3, 14)]), (True, True, [3, 9])],
)
def test_the_clock_hears_of_the_end_of_each_copy(
    tmp_path: Path, time: clocks.Clock, asynchronous: bool, lost: bool, expected: list[int]
) -> None:
    """In steps of ten seconds: none where the end of another is agreed on, and another one after each that fails."""
    config = make_config(
        tmp_path, SMALL, train={"global_batch": 4, "max_steps": 14}, parallel={"precision": "fp32"},
        checkpoint={"peer_copies": 1, "every": None, "asynchronous": asynchronous},
    )  # fmt: skip
    cluster = Nodes(["a", "b"])
    if lost:
        cluster.lose("b")
    assert copied(config, cluster.ranks[0], passing=time)[0] == expected


def test_what_goes_on_from_a_copy_is_not_committed(tmp_path: Path) -> None:
    """Trackers get no line that may still be cut, the clock counts from the checkpoint, and the run's end is saved."""
    config = make_config(
        tmp_path, SMALL, train={"global_batch": 4, "max_steps": 14}, parallel={"precision": "fp32"}, checkpoint=EVERY
    )
    storage, place = Nodes(["a", "b"]).ranks[0], RunDir.of(config)
    with pytest.raises(RuntimeError, match="a bug"):
        copied(config, storage, crash_at=12)
    prepared, before = prepare(config, 1)
    standing = with_peers(config, prepared, before, storage)
    assert (before.state.step, standing.state.step, standing.from_peers) == (8, 9, True)
    assert standing.commit == before.checkpoint and not standing.complete and standing.damaged == before.damaged
    started = run_start(config, prepared, standing, 2)
    assert (started.resumed_from, started.committed) == (9, 8)
    assert run_start(config, prepared, before, 2).committed is None
    cut, both = steps_after(place.metrics, 9), steps_after(place.metrics, 8)
    lost = lost_seconds(place, 9, cut)
    assert uncommitted_seconds(place, standing, lost, cut) == pytest.approx(lost_seconds(place, 8, both)) and lost > 0
    line = f'"attempt": {storage.names()[0][15]}'
    record = place.metrics.read_text()
    place.metrics.write_text(record.replace(line, '"attempt": 7'))
    assert with_peers(config, prepared, before, storage) is before, "another attempt has trained that step"
    place.metrics.write_text(record)
    assert copied(config, storage)[1] == [(4, False), (8, False), (12, False), (14, False)]
    (again,) = [each["fields"] for each in read_events(place.events) if each["fields"].get(names.FROM_PEERS)]
    assert again["resumed_from"] == 9


def test_a_run_whose_checkpoints_are_damaged_goes_on_from_its_copy(tmp_path: Path) -> None:
    """Unless they are gone, as where their storage is not mounted, or one that was made is newer."""
    sections: Any = {"train": {"global_batch": 4, "max_steps": 14}, "parallel": {"precision": "fp32"}}
    config = make_config(tmp_path, SMALL, **sections, checkpoint=EVERY)
    storage, place = Nodes(["a", "b"]).ranks[0], RunDir.of(config)
    with pytest.raises(RuntimeError, match="a bug"):
        copied(config, storage, crash_at=12)
    prepared, _ = prepare(config, 1)
    for found in committed(place.checkpoints):
        (Path(found.path) / "manifest.json").write_bytes(b"{")
    hold(empty := Nodes(["a", "b"]).ranks[0])
    with pytest.raises(ResumeError, match="every checkpoint is damaged"):
        look_with_peers(config, prepared, 1, empty)
    away = Path(place.checkpoints).rename(tmp_path / "away")
    with pytest.raises(ResumeError, match="has no checkpoint, but this run has saved step 8"):
        look_with_peers(config, prepared, 1, storage)
    away.rename(place.checkpoints)
    events = place.events.read_text()
    place.events.write_text(events.replace('"step": 8,', '"step": 10,'))
    with pytest.raises(ResumeError, match="every checkpoint is damaged"):
        look_with_peers(config, prepared, 1, storage)
    place.events.write_text(events)

    with alone(CPU):
        standing = agree(config, prepared, lambda: look_with_peers(config, prepared, 1, storage))
        assert (standing.state.step, standing.from_peers, standing.commit) == (9, True, None)
        work(config, prepared, standing, CPU, lambda: None, LauncherHooks(peers=storage))
    damaged = [
        each["fields"]["path"] for each in read_events(place.events) if each["event"] == names.CHECKPOINT_DAMAGED
    ]
    assert len(damaged) == 2 and [each.step for each in committed(place.checkpoints)] == [12, 14]
    whole = make_config(tmp_path, SMALL, **sections, run={"name": "whole"})
    with alone(CPU):
        work(whole, *prepare(whole, 1), CPU, lambda: None)
    assert read_trajectory(place.metrics) == read_trajectory(RunDir.of(whole).metrics)


def test_a_state_that_is_not_finite_is_not_kept_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Nodes()
    copies = PeerCopies(storage=cluster.ranks[0], every=3, clock=None)
    copies.ended(Outcome(step=6, ending="not_finite", problem="rank 0: model.w is not finite"))
    assert "there is no peer copy of step 6: rank 0: model.w is not finite" in caplog.text


def test_a_copy_waits_for_what_is_being_written() -> None:
    copies = PeerCopies(storage=Nodes().ranks[0], every=3, clock=None)

    def due(step: int, *, saving: bool = False, free: bool = True, asked: bool = False) -> bool:
        return copies.due(step, asked=asked, saving=saving, free=free)

    assert [due(1), due(2), due(3)] == [False, False, True]
    assert [due(6, free=False), due(7, free=False), due(8), due(9, saving=True), due(10)] == [
        False, False, True, False, False,
    ]  # fmt: skip
    assert [due(11, asked=True), due(12, free=False), due(13, saving=True), due(14)] == [True, False, False, False]


def test_copies_are_left_out_after_some_that_have_failed() -> None:
    """The more the longer: a keeper may be back after a second, and one that hangs costs each copy 40 s."""
    copies = PeerCopies(storage=Nodes().ranks[0], every=1, clock=None)
    failed = Outcome(step=1, ending="failed", problem="a keeper of peer copies does not answer")
    good = Outcome(step=2, ending="committed", saved=Saved(step=2, path="n0/step-2", seconds=0.1, bytes=1))
    for outcome, left_out in ((failed, 1), (failed, 3), (failed, 9), (failed, 9), (good, 0), (failed, 1)):
        copies.ended(outcome)
        due = [copies.due(step, asked=False, saving=False, free=True) for step in range(1, 13)]
        assert due == [False] * left_out + [True] * (12 - left_out)


@pytest.mark.slow
def test_the_planner_says_what_copies_take(tmp_path: Path) -> None:
    """Two at a time, on each of two machines: of its own two ranks, and of the other's."""
    train = {"global_batch": 16, "micro_batch": 2}
    config = make_config(tmp_path, train=train, parallel={"precision": "fp32"}, checkpoint={"peer_copies": 3})
    for world, others in ((2, 0), (8, 3)):
        found = predict(ModelSpec.of(config), config, world, Cluster(device=find_device("A100-80GB"), per_node=2))
        needs = host_needs(config, found)
        own = found.checkpoint * 2 // world
        assert needs.peers == PeerNeeds(others=others, memory=2 * (1 + others) * own, sent=others * own)
        page = as_page(
            Planned(
                prediction=found, host_needs=needs, advice=(), largest_micro_batch=None, allowed_micro_batch=1,
                paying_micro_batch=None, step_down=None, alternatives=(), shared=None, price=None, free=None,
                stopping=None, basis="its config",
            )
        )  # fmt: skip
        assert page.count("peer copies") == 1
        assert ("no other machine" in page) == (others == 0)
    without = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"peer_copies": 0})})
    assert host_needs(without, found).peers.memory == host_needs(without, found).peers.sent == 0
