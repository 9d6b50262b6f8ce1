"""The head of a cluster that was joined: whether it answers.

Without it Ray ends this process after a minute (`private.seconds_without_head`), with a line of its own, from C++:
nothing would be recorded or closed. So the run ends before that; a head that is back by then ends nothing.
"""

from __future__ import annotations

import socket
import sys
import time
from threading import Event

from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.launch.ray import private

_KNOCK_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_CLOSING_SECONDS = 10.0
"""What saying, recording and closing takes at most; half of that is left for Ray's own farewell."""


class Head:
    """Watched from a thread, as a call of Ray's may wait for it in this one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._place = private.host_and_port(address)
        self._limit = max(1.0, private.seconds_without_head() - _CLOSING_SECONDS)
        self._since: float | None = None
        self._closed = Event()
        in_thread(self._watch, "head")

    def answers(self) -> bool:
        """Whether it takes a connection now. What asks it for something would wait for it, as long as Ray does."""
        try:
            socket.create_connection(self._place, timeout=_KNOCK_SECONDS).close()
        except OSError:
            self._since = self._since or time.monotonic()
            return False
        self._since = None
        return True

    def lost(self) -> str | None:
        """That it is gone for good, in words."""
        since = self._since
        away = 0.0 if since is None else time.monotonic() - since
        if away < self._limit:
            return None
        return f"the head of the Ray cluster at {self.address} has not answered for {away:.0f} s"

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if not self.answers() and self.lost() and not self._closed.wait(_CLOSING_SECONDS / 2):
                # This process waits in a call of Ray's, which ends it now.
                print(f"error: {self.lost()}; the same command continues", file=sys.stderr, flush=True)
                return
