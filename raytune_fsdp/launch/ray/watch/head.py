"""Watch the head of a cluster that was joined: whether it answers, and is still the same.

Without it Ray ends this process after a minute (`private.seconds_without_head`), and at once where another cluster's
head has taken its place: with a line of its own, from C++, so that nothing would be recorded or closed. So the run ends
before that, unless the head is back by then.
"""

from __future__ import annotations

import socket
import sys
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Event, Lock

from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.launch.ray import private

HOW = "killed, out of memory, or crashed"
DIED = f"died ({HOW})"
_KNOCK_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_STRIDE_SECONDS = 5.0
"""The most that counts between two looks. After a longer pause this process was away: so may the head have been."""
CLOSING_SECONDS = 10.0
"""How long it takes at most to say, record and close everything; half of that is left for Ray's own farewell."""


class Head:
    """A head, watched from a thread of its own: the main thread may be waiting for it in a call of Ray's."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._cluster = private.own_cluster()
        """The id of the cluster that this process has joined."""
        self._asking: Future[str] | None = None
        """A question whose head answers there, which is not answered yet."""
        self.is_another = False
        """Whether another cluster's head has taken the place of ours. It never comes back."""
        self._limit = max(1.0, private.seconds_without_head() - CLOSING_SECONDS)
        self._places: list[tuple[str, int]] = []
        with suppress(OSError):
            self._resolve()
        self._lock = Lock()
        self._looked = time.monotonic()
        self._sure = True
        """Whether the head is known to be there, and to be the one whose cluster was joined."""
        self._away = 0.0
        """For how many seconds every look has failed, without the time in which nobody looked."""
        self._naming: Future[None] | None = None
        self._closed = Event()
        in_thread(self._watch, "head")

    def answers(self) -> bool:
        """Return whether the head takes a connection now. If not, any question to it would wait as long as Ray does."""
        with self._lock:
            was_sure = self._sure
            there = self._knock()
            now = time.monotonic()
            passed, self._looked = now - self._looked, now
            self._sure = there and ((was_sure and passed < _STRIDE_SECONDS) or self._is_ours())
            self._away = 0.0 if self._sure or was_sure else self._away + min(passed, _STRIDE_SECONDS)
            return self._sure

    def lost(self) -> str | None:
        """Say that the head is gone for good, if it is."""
        if self.is_another:
            return (
                f"the head of the Ray cluster at {self.address} has come back without its state, as another cluster's"
            )
        if self._away < self._limit:
            return None
        return f"the head of the Ray cluster at {self.address} has not answered for {self._away:.0f} s"

    def close(self) -> None:
        self._closed.set()

    def _resolve(self) -> None:
        host, port = private.host_and_port(self.address)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._places = [(str(place[0]), int(place[1])) for *_, place in found]

    def _knock(self) -> bool:
        for place in self._places:
            try:
                socket.create_connection(place, timeout=_KNOCK_SECONDS).close()
            except OSError:
                continue
            return True
        # Its name may mean another machine by now, as that of a service does; or names are what does not answer.
        if self._naming is None or self._naming.done():
            self._naming = in_thread(self._resolve, "name of the head")
        self._asking = None  # nothing answers there now, so what was asked may be gone
        return False

    def _is_ours(self) -> bool:
        """Ask whose head answers; False as long as that does not say so."""
        asking = self._asking or in_thread(lambda: private.cluster_at(self.address), "cluster of the head")
        self._asking = None if wait([asking], timeout=_KNOCK_SECONDS / 2).done else asking
        if self._asking is not None or asking.exception() is not None:
            return False
        self.is_another = self.is_another or asking.result() != self._cluster
        return not self.is_another

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if not self.answers() and self.lost() and not self._closed.wait(CLOSING_SECONDS / 2):
                # This process waits in a call of Ray's, which ends it now.
                print(f"error: {self.lost()}; the same command continues", file=sys.stderr, flush=True)
                return
