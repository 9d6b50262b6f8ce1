"""A storage over the keepers of a run: the files of a peer copy lie on several nodes, each on more than one.

A rank's file goes to its own node and to the ones after it, the small files to all nodes, the manifest last. So a copy
is one as long as some node that is left has its manifest, and whole if the nodes that are left have every file of it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Protocol

import xxhash

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.base.untrusted import check_size
from raytune_fsdp.checkpoint.peers.keeper import Held, Keeper
from raytune_fsdp.checkpoint.storage import (
    MANIFEST_FILE,
    PIECES,
    Pinned,
    Sink,
    StoredFile,
    at_once,
    nobody,
    not_pinned,
)

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
"""What is sent, and read, at a time."""
_UNDER_WAY = 2
"""Pieces that a rank has sent and no keeper has confirmed: more only take memory."""


class Keepers(Protocol):
    """The keepers of a run, by their nodes. OSError if one that is needed does not answer, or cannot do it."""

    def write(self, nodes: Sequence[str], name: str, file: str, offset: int, piece: bytes) -> Callable[[], None]:
        """Begin to send a piece of a file; return what waits until all of these nodes have it."""

    def seal(self, nodes: Sequence[str], name: str, file: str, size: int, xxh3: str) -> None:
        """Return when all of these nodes have the whole file."""

    def read(self, node: str, name: str, file: str, offset: int, size: int) -> bytes | memoryview:
        """Return bytes of a whole file that this node has."""

    def held(self) -> Mapping[str, Held]:
        """Return what each node has that answers."""

    def drop(self, names: Collection[str]) -> None:
        """Let all nodes that answer forget these copies."""

    def forget(self, attempt: int, but: str | None) -> None:
        """Let all nodes that answer forget the copies of attempts before this one, but for one copy."""


class KeepersHere:
    """Keepers in this process."""

    def __init__(self, keepers: Mapping[str, Keeper]) -> None:
        self.keepers = dict(keepers)

    def write(self, nodes: Sequence[str], name: str, file: str, offset: int, piece: bytes) -> Callable[[], None]:
        for node in nodes:
            self._of(node).write(name, file, offset, piece)
        return at_once

    def seal(self, nodes: Sequence[str], name: str, file: str, size: int, xxh3: str) -> None:
        for node in nodes:
            self._of(node).seal(name, file, size, xxh3)

    def read(self, node: str, name: str, file: str, offset: int, size: int) -> bytes:
        return self._of(node).read(name, file, offset, size)

    def held(self) -> dict[str, Held]:
        return {node: keeper.held() for node, keeper in self.keepers.items()}

    def drop(self, names: Collection[str]) -> None:
        for keeper in self.keepers.values():
            keeper.drop(names)

    def forget(self, attempt: int, but: str | None) -> None:
        for keeper in self.keepers.values():
            keeper.forget(attempt, but)

    def _of(self, node: str) -> Keeper:
        if node not in self.keepers:
            raise OSError(f"the keeper of {node} is gone")
        return self.keepers[node]


def copies_of(own: str, nodes: Collection[str], count: int) -> list[str]:
    """Return the nodes that get the file of a rank: its own, and the next `count` in their order."""
    order = sorted(nodes)
    first = order.index(own)
    return [order[(first + each) % len(order)] for each in range(min(1 + count, len(order)))]


class PeerStorage:
    """The peer copies of a run as one rank has them; an implementation of `Storage`."""

    def __init__(
        self,
        location: str,
        keepers: Keepers,
        nodes: Collection[str],
        *,
        own: str,
        count: int,
        given_up: Event | None = None,
    ) -> None:
        """`nodes`: those with ranks of this attempt, `own` the one of this rank. `count`: `checkpoint.peer_copies`.

        `given_up`: set by `give_up`, for keepers that let nobody wait then.
        """
        self.location = location
        self._keepers = keepers
        self._all = sorted(nodes)
        self._targets = copies_of(own, nodes, count)
        self._own = own
        self._held: Mapping[str, Held] = {}
        """What the keepers have answered when they were asked last."""
        self._given_up = given_up or Event()

    @property
    def nodes_of_a_file(self) -> int:
        """On how many nodes a rank's file is."""
        return len(self._targets)

    def draft(self, name: str, serial: int) -> PeerDraft:
        return PeerDraft(self._keepers, self.location, name, self._all, self._targets, self._given_up)

    def give_up(self) -> None:
        """Let what is being sent fail, and all that would be sent later."""
        self._given_up.set()

    def names(self) -> list[str]:
        self._held = self._keepers.held()
        return sorted({name for held in self._held.values() for name, files in held.items() if MANIFEST_FILE in files})

    def has_damaged(self) -> bool:
        return False

    def where(self, name: str) -> str:
        return f"{self.location}/{name}"

    def sizes(self, name: str) -> dict[str, int]:
        self._held = self._keepers.held()
        return _sizes(self._held, name)

    def read(self, name: str, file: str, limit: int) -> bytes:
        size = next((sizes[name][file] for _, sizes in self._having(name, file)), None)
        if size is None:
            raise FileNotFoundError(f"no node has {self.where(name)}/{file}")
        check_size(size, limit)
        return bytes(self._read(name, file, 0, size))

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[StoredFile]:
        yield _PeerSource(lambda offset, size: self._read(name, file, offset, size))

    def put(self, name: str, file: str, content: bytes) -> None:
        raise OSError(f"{self.where(name)}: nothing is added to a peer copy")

    def set_aside(self, name: str) -> str:
        self.remove(name)
        return "nowhere: it was in memory"

    def remove(self, name: str, needed: Callable[[], bool] = nobody) -> bool:
        self._keepers.drop([name])  # a copy is its own run's alone
        return True

    def clean(self, pinned: Pinned = not_pinned) -> None:
        """Do nothing: what is unfinished goes with the next copy."""

    def forget(self, attempt: int, but: str | None) -> None:
        """Forget what attempts before this one have left, but for one copy."""
        self._keepers.forget(attempt, but)

    def _having(self, name: str, file: str) -> list[tuple[str, Held]]:
        """Return the nodes that have a file, this rank's own first."""
        self._held = self._held or self._keepers.held()
        there = [(node, held) for node, held in self._held.items() if file in held.get(name, {})]
        return sorted(there, key=lambda each: (each[0] != self._own, each[0]))

    def _read(self, name: str, file: str, offset: int, size: int) -> bytes | memoryview:
        parts: list[bytes | memoryview] = []
        while True:
            part = self._read_part(name, file, offset, min(size, _PIECE_BYTES))
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
            if not size or not part:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_part(self, name: str, file: str, offset: int, size: int) -> bytes | memoryview:
        for node, _ in self._having(name, file):
            try:
                return self._keepers.read(node, name, file, offset, size)
            except OSError as error:  # another node may have it
                logger.info("%s", in_one_line(error))
                self._held = {each: held for each, held in self._held.items() if each != node} or {node: {}}
        # Not an error of a storage that may answer later: memory that is gone does not come back.
        raise FileNotFoundError(f"no node has {self.where(name)}/{file}")


def _sizes(held: Mapping[str, Held], name: str) -> dict[str, int]:
    """Return the sizes of the files of a copy that any of these nodes has."""
    return {file: size for copies in held.values() for file, size in copies.get(name, {}).items()}


@dataclass(frozen=True, slots=True)
class PeerDraft:
    keepers: Keepers
    location: str
    name: str
    everywhere: Sequence[str]
    targets: Sequence[str]
    given_up: Event
    again: bool = field(default=False, init=False)

    @contextmanager
    def create(self, file: str) -> Iterator[Sink]:
        sink = _PeerSink(self, file, self.targets if file.endswith(PIECES) else self.everywhere)
        yield sink
        sink.seal()  # not after an exception: what is not sealed is not there

    def publish(self, sizes: Mapping[str, int], manifest: str, before: Callable[[], None] = at_once) -> None:
        held = self.keepers.held()
        present = _sizes(held, self.name)
        if present != sizes:
            raise OSError(f"{self.location}/{self.name} holds {present}, but what was sent there is {dict(sizes)}")
        before()
        try:
            with self.create(MANIFEST_FILE) as sink:
                sink.write(memoryview(manifest.encode()))
        except OSError as error:
            # A node that has it has forgotten the copy before, so this one must not be discarded: it is whole.
            if not any(MANIFEST_FILE in held.get(self.name, {}) for held in self.keepers.held().values()):
                raise
            logger.info("not all nodes have the manifest of %s: %s", self.name, in_one_line(error))
            return
        # A node that has this manifest forgets older copies. One without ranks by now would keep its part for good.
        older = {name for node, copies in held.items() if node not in self.everywhere for name in copies}
        if older:
            self.keepers.drop(sorted(older))

    def discard(self) -> None:
        try:
            self.keepers.drop([self.name])
        except Exception as error:  # it goes with the next copy
            logger.warning("%s/%s is left unfinished: %s", self.location, self.name, in_one_line(error))


class _PeerSink:
    """A file on its way to several nodes."""

    def __init__(self, draft: PeerDraft, file: str, nodes: Sequence[str]) -> None:
        self._draft, self._file, self._nodes = draft, file, nodes
        self._waiting = bytearray()
        """What is too small to be sent on its own: a piece has many small parts."""
        self._sent = 0
        self._under_way: deque[Callable[[], None]] = deque()
        self._digest = xxhash.xxh3_128()

    def write(self, piece: memoryview, /) -> None:
        self._digest.update(piece)
        while piece:
            part = piece[: _PIECE_BYTES - len(self._waiting)]
            self._waiting += part
            piece = piece[len(part) :]
            if len(self._waiting) == _PIECE_BYTES:
                self._send()

    def seal(self) -> None:
        if self._waiting or not self._sent:
            self._send()
        while self._under_way:
            self._under_way.popleft()()
        self._draft.keepers.seal(self._nodes, self._draft.name, self._file, self._sent, self._digest.hexdigest())

    def _send(self) -> None:
        if self._draft.given_up.is_set():
            raise OSError("it was given up, as the attempt ends")
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft()()
        piece, self._waiting = bytes(self._waiting), bytearray()
        sent = self._draft.keepers.write(self._nodes, self._draft.name, self._file, self._sent, piece)
        self._under_way.append(sent)
        self._sent += len(piece)


class _PeerSource:
    """A file read by position. Small parts are fetched together."""

    def __init__(self, read: Callable[[int, int], bytes | memoryview]) -> None:
        self._read = read
        self._ahead: bytes | memoryview = b""
        self._ahead_from = 0

    def read_into(self, offset: int, target: memoryview) -> None:
        start = offset - self._ahead_from
        if not 0 <= start <= len(self._ahead) - len(target):
            self._ahead, self._ahead_from, start = self._read(offset, max(_PIECE_BYTES, len(target))), offset, 0
            if len(self._ahead) < len(target):
                raise OSError(f"the file ends at byte {offset + len(self._ahead)}, before {offset + len(target)}")
        target[:] = self._ahead[start : start + len(target)]
