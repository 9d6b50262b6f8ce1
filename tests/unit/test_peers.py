"""Peer copies: what is kept in the memory of nodes, and what is never taken for a copy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from raytune_fsdp.base.untrusted import UnsoundError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed, verify
from raytune_fsdp.checkpoint.location import hold, in_memory, new_location, storage_at
from raytune_fsdp.checkpoint.manifest import check_files, make_manifest
from raytune_fsdp.checkpoint.peers import storage as peers
from raytune_fsdp.checkpoint.peers.keeper import Keeper
from raytune_fsdp.checkpoint.peers.storage import KeepersHere, PeerStorage, copies_of
from raytune_fsdp.checkpoint.storage import PosixStorage, directory_name
from raytune_fsdp.checkpoint.writing import Sum, write_small

NODES = ("a", "b", "c")


def name_of(step: int, attempt: int = 1) -> str:
    return directory_name(step, attempt, lasting=False)


class Cluster:
    """A keeper on each node, and a rank on each that reaches all of them."""

    def __init__(self, nodes: Sequence[str] = NODES, count: int = 1) -> None:
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
    cluster = Cluster()
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
    cluster = Cluster()
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


@pytest.mark.parametrize("lost", NODES)
def test_one_lost_node_never_takes_a_copy(lost: str) -> None:
    cluster = Cluster()
    name = cluster.save(7)
    cluster.lose(lost)
    for storage in cluster.ranks:
        assert storage.names() == [name] and check_files(storage, name, hashes=True) is None


def test_two_lost_nodes_take_it_unless_there_are_more_copies() -> None:
    for count, problem in ((1, "__1_1.distcp is gone"), (2, None)):
        cluster = Cluster(count=count)
        name = cluster.save(7)
        cluster.lose("b")
        cluster.lose("c")
        storage = cluster.ranks[0]
        assert storage.names() == [name]
        found = check_files(storage, name, hashes=True)
        assert (found is None) if problem is None else (found is not None and found.startswith(problem)), found


def test_where_copies_are() -> None:
    assert copies_of("b", NODES, 1) == ["b", "c"] and copies_of("c", NODES, 1) == ["c", "a"]
    assert copies_of("a", ["a"], 1) == ["a"], "only its own: it survives a rank, not the node"
    assert copies_of("a", ["b", "a"], 5) == ["a", "b"]


def test_a_keeper_that_is_lost_while_it_is_read_is_replaced_by_another() -> None:
    cluster = Cluster()
    name = cluster.save(7)
    storage = cluster.ranks[0]
    storage.sizes(name)
    cluster.lose("a")
    assert storage.read(name, "state.json", 99) == b"state.json"
    cluster.lose("b")
    with storage.open(name, "__0_1.distcp") as source, pytest.raises(FileNotFoundError, match="no node has"):
        source.read_into(0, memoryview(bytearray(10)))
    assert "is gone" in str(check_files(storage, name, hashes=True))


Plant = Callable[[Cluster, str], object]
PLANTED: list[Plant] = [
    lambda cluster, name: cluster.keepers["a"].write(name, "__0_1.distcp", 0, b"half"),
    lambda cluster, name: cluster.write(9, 2),
    lambda cluster, name: cluster.keepers["a"].write(name, "manifest.json", 0, b"{}"),
]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_not_sealed_with_its_manifest_is_no_copy(plant: Plant) -> None:
    cluster = Cluster()
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
    cluster = Cluster()
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
    cluster = Cluster()
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
    for lost in NODES:
        cluster = Cluster()
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


def committed_in(storage: PeerStorage) -> list[str]:
    return sorted(storage.names())


def test_what_a_dead_attempt_has_sent_comes_too_late() -> None:
    cluster = Cluster()
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
    cluster = Cluster()
    name = cluster.save(5)
    cluster.lose("b")
    with pytest.raises(OSError, match="the keeper of b is gone"):
        cluster.write(6)
    cluster.ranks[0].draft(name_of(6), 1).discard()
    assert cluster.ranks[0].names() == [name] and check_files(cluster.ranks[0], name, hashes=True) is None


def test_rows_are_sent_in_pieces_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch writes a piece of a hundred bytes in ten parts: none of them travels alone."""
    monkeypatch.setattr(peers, "_PIECE_BYTES", 1000)
    cluster = Cluster()
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
