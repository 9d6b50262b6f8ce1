"""A lease proves that a run is still this command's: another takes it over if the first gives no sign of life.

`lock` in the run's directory says whose the run is, and only taking the run over changes it. So every process that
writes for the run checks it first: one that was stopped for a while may wake up in a run that has gone on without it.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.base.untrusted import read_file

MOST_BYTES = 1000
_EVERY_SECONDS = 2.0
_LOOKS, _LOOK_SECONDS = 11, 0.5
"""How often a missing lock is looked for: in five seconds an automounter mounts what it has unmounted."""

_held: dict[Path, Lease] = {}
"""The leases of this process, by the lock's path."""


class TakenOverError(TrainingError):
    """Another command works on the run now, or nothing says whose it is."""


@dataclass(slots=True)
class Lease:
    """The right of one command to write for a run. It can be sent to other processes, which then write, too."""

    path: Path
    token: str
    """Distinguishes this command's lock from any other's."""
    _checked: float = field(default=0.0, compare=False)
    _lost: str = field(default="", compare=False)
    """Why the run is no longer this command's; never reset."""

    def check(self) -> None:
        """Raise if the run is another command's. Storage that does not answer proves nothing, and raises nothing."""
        self.check_known()
        if why := self._why_lost():
            self._lost = why
        self._checked = time.monotonic()
        self.check_known()

    def _why_lost(self) -> str:
        try:
            found = json.loads(self._read())
        except FileNotFoundError:
            # The lock is not put back, though nobody holds it: another command may have taken the run over while this
            # process was stopped, and have ended since, which removes its lock, too. No clock tells how long we were
            # stopped.
            return (
                f"{self.path} has gone, so nothing says any more that this command works on the run: it was removed, "
                "or its directory was, or is not mounted; what is saved is saved, and this command writes nothing "
                "more; the same command continues"
            )
        except (OSError, ValueError):
            return ""
        if isinstance(found, dict) and found.get("token") == self.token:
            return ""
        return (
            f"{self.path} is not this command's any more: another one has taken the run over, as this one gave no "
            "sign of life; what is saved is saved, and this command writes nothing more"
        )

    def _read(self) -> bytes:
        """Return the lock's content. A missing lock is looked for again: a mount may come back."""
        for _ in range(_LOOKS - 1):
            with suppress(FileNotFoundError):
                return read_file(self.path, limit=MOST_BYTES)
            time.sleep(_LOOK_SECONDS)
        return read_file(self.path, limit=MOST_BYTES)

    def check_now_and_then(self) -> None:
        """Raise if the run is another command's; look at the lock at most once in two seconds."""
        self.check_known()
        if time.monotonic() - self._checked > _EVERY_SECONDS:
            self.check()

    def check_known(self) -> None:
        """Raise if an earlier check has found the run to be another's: for loops that must not wait for storage."""
        if self._lost:
            raise TakenOverError(self._lost)

    def lost(self) -> bool:
        """Return whether the run is another command's: a check that does not raise."""
        try:
            self.check()
        except TakenOverError:
            return True
        return False


def hold(lease: Lease) -> None:
    _held[lease.path] = lease


def release(path: Path) -> None:
    _held.pop(path, None)


def lease_of(path: Path) -> Lease | None:
    """Return the lease that this process has on the run with this lock; None if it has none."""
    return _held.get(path)


def token_of(lease: Lease | None) -> str:
    """Return the token of a command; an empty text if it has no lock."""
    return "" if lease is None else lease.token
