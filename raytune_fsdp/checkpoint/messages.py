"""How the ranks' writers report to each other, beside training and without waiting in a collective.

A collective would hang with the rank whose storage hangs, and could not be given up; here whoever waits has a deadline.
The messages go through the store over which the process group itself was made: it is there, and all ranks reach it.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

_LOOK_SECONDS = 1.0


class Messages:
    """Messages by key, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def send(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def receive(self, key: str) -> Any | None:
        """The message under a key, None if there was none within a second."""
        deadline, pause = time.monotonic() + _LOOK_SECONDS, 0.002
        # Polled: a thread that waits in the store keeps this rank's other thread from it.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)
        value = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return value


def open_messages() -> Messages:
    """A place for messages that all ranks know, and nobody has used before. Collective."""
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    return Messages(PrefixStore(name[0], _get_default_store()))
