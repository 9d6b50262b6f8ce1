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
_PART_BYTES = 1 << 20
"""A message is sent in parts of this size. The server of torch's store takes 8 MiB; a larger value ends the connection,
for this rank's other uses of the store as well. Hashes of the adapters of a 70B come near that."""


class Messages:
    """Messages by key. Each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def send(self, key: str, value: object) -> None:
        content = json.dumps(value)
        parts = [content[start : start + _PART_BYTES] for start in range(0, len(content), _PART_BYTES)]
        for number, part in enumerate(parts[1:]):
            self._store.set(f"{key}/part {number}", part)
        # Last: who sees the key finds all parts.
        self._store.set(key, f"{len(parts) - 1} {parts[0]}")

    def receive(self, key: str, *, pause: float = 0.002) -> Any | None:
        """Return the message under a key; None if there is none within a second. `pause`: before it looks again."""
        deadline = time.monotonic() + _LOOK_SECONDS
        # Polled, every 2 to 50 ms: a thread that waits inside the store keeps this rank's other threads from using it.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = max(pause, min(0.05, 1.5 * pause))
        more, _, content = self._take(key).partition(" ")
        return json.loads(content + "".join(self._take(f"{key}/part {number}") for number in range(int(more))))

    def drop(self, key: str) -> None:
        """Remove a message that nobody will read, if it is there."""
        if self._store.check([key]):
            self.receive(key)

    def _take(self, key: str) -> str:
        value = self._store.get(key)
        self._store.delete_key(key)  # the store lives as long as the process group: messages would pile up
        return value.decode()


def open_messages() -> Messages:
    """Return messages under a prefix that all ranks share and nothing else uses. Collective."""
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    return Messages(PrefixStore(name[0], _get_default_store()))
