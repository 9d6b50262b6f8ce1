"""The keepers of peer copies: an actor on every node with ranks, which outlives attempts and ends with the command.

The driver owns the actors and shares their handles with the ranks of each attempt. A rank sends a file in pieces
through Ray's memory for objects, which passes each to all nodes that keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, RayError

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.checkpoint.location import new_location
from raytune_fsdp.checkpoint.peers.keeper import Held, Keeper
from raytune_fsdp.checkpoint.peers.storage import PeerStorage
from raytune_fsdp.launch.ray.board import Board, Joined
from raytune_fsdp.launch.ray.placement_groups import started_on

_CALLS = 16
"""At the same time: those of the ranks of several nodes."""
_KEY = "keepers"
_LOOK_SECONDS = 1.0
"""How long the driver waits for a keeper of an earlier attempt to say that it is there."""
_ANSWER_SECONDS = 10.0
"""How long a rank waits for an answer. One that does not come counts as the end of the keeper."""
_PIECE_SECONDS = 30.0
_LEAVE_SECONDS = 0.3
"""How long a rank waits on for an answer once its copies are given up: the last checkpoint waits for that."""


class _KeeperActor:
    """The actor: a `Keeper` whose bytes travel as arrays, which Ray does not copy to pickle them."""

    def __init__(self) -> None:
        self._keeper = Keeper()

    def write(self, name: str, file: str, offset: int, piece: NDArray[np.uint8]) -> None:
        self._keeper.write(name, file, offset, piece.data)

    def seal(self, name: str, file: str, size: int, xxh3: str) -> None:
        self._keeper.seal(name, file, size, xxh3)

    def read(self, name: str, file: str, offset: int, size: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._keeper.read(name, file, offset, size), np.uint8)

    def held(self) -> Held:
        return self._keeper.held()

    def nbytes(self) -> int:
        return self._keeper.nbytes()

    def drop(self, names: list[str]) -> None:
        self._keeper.drop(names)

    def forget(self, attempt: int, but: str | None) -> None:
        self._keeper.forget(attempt, but)


_KEEPER = ray.remote(num_cpus=0, max_concurrency=_CALLS, max_restarts=-1)(_KeeperActor)
"""If its process dies, Ray starts an empty one with the same handles: copies go on within the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the ranks of an attempt are told."""

    location: str
    keepers: Mapping[str, Any]
    """Handles by the ids of nodes."""
    known: Collection[str]
    """Those that earlier attempts have had: only they can hold anything."""
    nodes: Collection[str]
    """The nodes with ranks."""


class NodeKeepers:
    """The keepers of a command, as its driver has them."""

    def __init__(self, copies: int, board: Board, say: Callable[[str], None]) -> None:
        """`copies`: `checkpoint.peer_copies`; 0: there are no keepers."""
        self._copies = copies
        self._board = board
        self._say = say
        self._location = new_location()
        self._actors: dict[str, Any] = {}
        self._known: set[str] = set()
        self._world = 0
        self._told = False

    def begin(self, world: int) -> None:
        """Note that an attempt begins that has so many ranks."""
        self._world, self._known = world, set(self._actors)

    def joined(self, ranks: Mapping[int, Joined]) -> None:
        """Start a keeper on each new node of these ranks. Once all have joined, tell them where all keepers are."""
        if not self._copies:
            return
        nodes = {rank.node_id for rank in ranks.values()}
        for node in nodes - self._actors.keys():
            self._actors[node] = started_on(node, _KEEPER)
        if len(ranks) < self._world:
            return
        self._replace_ended(nodes)
        if len(nodes) == 1 and not self._told:
            self._told = True
            self._say(
                f"checkpoint.peer_copies={self._copies}: all ranks are on one node, so copies outlive lost ranks, "
                "and not the node"
            )
        shared = Shared(location=self._location, keepers=dict(self._actors), known=set(self._known), nodes=nodes)
        with suppress(RayError):  # a board that is gone, or out of reach for long, ends the attempt
            self._board.share(_KEY, shared, _LOOK_SECONDS)

    def _replace_ended(self, nodes: Collection[str]) -> None:
        """Start new keepers where those of earlier attempts have ended, and leave out the others that have."""
        asked = {self._actors[node].nbytes.remote(): node for node in self._known}
        ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=_LOOK_SECONDS) if asked else ([], [])
        for each in ready:
            try:
                ray.get(each)
            except (ActorDiedError, ActorUnschedulableError):  # the second one: its node is lost
                node = asked[each]
                self._known.discard(node)
                del self._actors[node]
                if node in nodes:
                    self._actors[node] = started_on(node, _KEEPER)
            except RayError:
                continue  # out of reach: the ranks find out whether it answers them

    def end(self) -> None:
        for actor in self._actors.values():
            with suppress(RayError):
                ray.kill(actor)
        self._actors = {}


def peers_of_rank(board: Board, copies: int) -> PeerStorage:
    """Return the peer copies as this rank has them. Waits until all ranks have joined."""
    shared: Shared = board.shared(_KEY)
    given_up = Event()
    keepers = KeepersOnRay(shared.keepers, shared.known, given_up)
    own = ray.get_runtime_context().get_node_id()
    return PeerStorage(shared.location, keepers, shared.nodes, own=own, count=copies, given_up=given_up)


class KeepersOnRay:
    """`Keepers` that are actors, as a rank reaches them. Only its save's thread writes."""

    def __init__(self, actors: Mapping[str, Any], known: Collection[str], given_up: Event) -> None:
        self._actors = dict(actors)
        self._given_up = given_up
        self._asked = {node for node in known if node in actors}
        """Those that may hold something, and answer."""

    def write(self, nodes: Sequence[str], name: str, file: str, offset: int, piece: bytes) -> Callable[[], None]:
        # One object, of which each node gets its copy from the other ones.
        shared = _given(lambda: ray.put(np.frombuffer(piece, np.uint8)))
        self._asked |= set(nodes)
        calls = [self._actors[node].write.remote(name, file, offset, shared) for node in nodes]
        return partial(self._done, calls)

    def seal(self, nodes: Sequence[str], name: str, file: str, size: int, xxh3: str) -> None:
        self._done([self._actors[node].seal.remote(name, file, size, xxh3) for node in nodes])

    def read(self, node: str, name: str, file: str, offset: int, size: int) -> memoryview:
        call = self._actors[node].read.remote(name, file, offset, size)
        found: NDArray[np.uint8] = _given(lambda: ray.get(call, timeout=_PIECE_SECONDS))
        return found.data

    def held(self) -> dict[str, Held]:
        calls = {node: self._actors[node].held.remote() for node in self._asked}
        found = {node: _answer(each) for node, each in zip(calls, self._waited(calls.values()), strict=True)}
        self._asked = {node for node, each in found.items() if each is not None}
        return {node: each for node, each in found.items() if each is not None}

    def drop(self, names: Collection[str]) -> None:
        self._waited([self._actors[node].drop.remote([*names]) for node in self._asked])

    def forget(self, attempt: int, but: str | None) -> None:
        self._waited([self._actors[node].forget.remote(attempt, but) for node in self._asked])

    def _done(self, calls: Sequence[Any]) -> None:
        """Wait until all have done it."""
        until = time.monotonic() + _PIECE_SECONDS
        while True:
            try:
                _given(lambda: ray.get([*calls], timeout=_LEAVE_SECONDS))
                return
            except GetTimeoutError:
                if self._given_up.is_set():
                    raise OSError("a keeper of peer copies had not answered when the attempt ended") from None
                if time.monotonic() > until:
                    raise

    def _waited(self, calls: Collection[Any]) -> list[Any]:
        """Wait for the answers, for all together."""
        asked, until = [*calls], time.monotonic() + _ANSWER_SECONDS
        late = asked
        while late:
            _, late = ray.wait(late, num_returns=len(late), timeout=_LEAVE_SECONDS)
            if self._given_up.is_set() or time.monotonic() > until:
                break
        return asked


def _given(call: Callable[[], Any]) -> Any:
    """Return what Ray returns; OSError if it is what fails: to a save that is a storage that fails."""
    try:
        return call()
    except OSError:  # raised by the keeper itself
        raise
    except RayError as error:
        raise OSError(f"a keeper of peer copies does not answer: {in_one_line(error)}") from error


def _answer(call: Any) -> Any:
    """Return the answer that is there; None if there is none."""
    with suppress(RayError, OSError):
        return ray.get(call, timeout=0.1)
    return None
