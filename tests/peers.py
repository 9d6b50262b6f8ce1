"""Keepers in this process, for ranks in others: each reaches them through a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.managers import BaseManager
from typing import Any

from raytune_fsdp.checkpoint.location import new_location
from raytune_fsdp.checkpoint.peers.keeper import Keeper
from raytune_fsdp.checkpoint.peers.storage import KeepersHere, PeerStorage


class Served(BaseManager):
    pass


Served.register("keeper")


def _the(keeper: Keeper) -> Keeper:
    return keeper


def _serve(server: Any) -> None:
    with suppress(SystemExit):  # with which it ends
        server.serve_forever()


@contextmanager
def serving(nodes: Sequence[str]) -> Iterator[tuple[dict[str, Keeper], dict[str, Any]]]:
    """Keepers by node, and what `reach` needs to know of them."""
    keepers = {node: Keeper() for node in nodes}
    servers = {}
    for node, keeper in keepers.items():

        class Serving(BaseManager):
            pass

        Serving.register("keeper", callable=partial(_the, keeper))
        servers[node] = Serving(authkey=b"key").get_server()
        threading.Thread(target=partial(_serve, servers[node]), daemon=True).start()
    yield keepers, {"location": new_location(), "at": {node: each.address for node, each in servers.items()}}
    for server in servers.values():
        server.stop_event.set()  # type: ignore[attr-defined]


def reach(served: dict[str, Any], own: str, count: int = 1, nodes: Sequence[str] = ()) -> PeerStorage:
    """The peer copies as a rank on this node has them. `nodes`: those with ranks."""
    keepers: dict[str, Any] = {}
    for node, address in served["at"].items():
        manager = Served(address, b"key")
        manager.connect()
        keepers[node] = manager.keeper()  # type: ignore[attr-defined]
    return PeerStorage(served["location"], KeepersHere(keepers), nodes or keepers, own=own, count=count)
