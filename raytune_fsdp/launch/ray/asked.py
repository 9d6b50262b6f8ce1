"""A stop that somebody asks for in the run directory is for the driver what a signal is.

Rank 0 looks there, too, but only while it trains: a run that waits for nodes, or is between two attempts, has no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from raytune_fsdp.base.lease import lease_of, token_of
from raytune_fsdp.checkpoint.on_demand import is_asked_to_stop
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.plan.run_dir import RunDir

_LOOK_SECONDS = 1.0


@contextmanager
def heeding_requests(place: RunDir, signals: Signals) -> Iterator[None]:
    """Count a request to stop as a signal, while the context lasts."""
    token, over = token_of(lease_of(place.lock)), Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            with suppress(OSError):
                if is_asked_to_stop(place.path, token):
                    signals.count = max(1, signals.count)
                    return

    # A thread of its own, which nobody waits for: storage may hang, and the driver must hear signals and ranks.
    Thread(target=look, name="stop-requests", daemon=True).start()
    try:
        yield
    finally:
        over.set()
