"""How the ranks' writers report to each other while training goes on, without a collective.

A collective would hang with the rank whose storage hangs, and could not be given up; here every wait has a deadline.
The messages go through the store from which the process group was made: it exists, and all ranks reach it.
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
    """Messages by key. Each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def send(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def receive(self, key: str) -> Any | None:
        """The message under a key; None if there is none within a second."""
        deadline, pause = time.monotonic() + _LOOK_SECONDS, 0.002
        # Polled, every 2 to 50 ms: a thread that waits inside the store blocks this rank's other threads from using it.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)
        value = json.loads(self._store.get(key))
        self._store.delete_key(key)  # the store lives as long as the process group: messages would pile up
        return value


def open_messages() -> Messages:
    """Messages under a prefix that all ranks share and nothing else uses. Collective."""
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    return Messages(PrefixStore(name[0], _get_default_store()))
