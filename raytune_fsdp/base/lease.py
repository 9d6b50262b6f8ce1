"""Whether a run is still this command's: another one takes it over where the first gives no sign of life.

`lock` in the run's directory says whose the run is, and is never changed but by taking it over. So whoever writes for
the run asks it first: a process that was stopped for a while may wake up in a run that has gone on without it.
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
"""How often a lock that is missing is looked for: in five seconds an automounter mounts what it has unmounted."""

_held: dict[Path, Lease] = {}
"""Those of this process, by the lock's path."""


class TakenOverError(TrainingError):
    """Another command works on the run now, or nothing says whose it is."""


@dataclass(slots=True)
class Lease:
    """Can be sent to other processes, which then write for the run, too."""

    path: Path
    token: str
    """Tells this command's lock from any other one's."""
    _checked: float = field(default=0.0, compare=False)
    _lost: str = field(default="", compare=False)
    """Why the run is not this command's any more: once and for all."""

    def check(self) -> None:
        """Raise if the run is another command's. Storage that does not answer says nothing."""
        self.check_known()
        if why := self._why_lost():
            self._lost = why
        self._checked = time.monotonic()
        self.check_known()

    def _why_lost(self) -> str:
        try:
            found = json.loads(self._read())
        except FileNotFoundError:
            # Not put back, though nobody else has it: a newcomer may have taken the run over while this process was
            # away, and have ended meanwhile, which removes its lock, too. No clock tells how long we were away.
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
        """The lock's content. One that is missing is looked for again: a mount may come back."""
        for _ in range(_LOOKS - 1):
            with suppress(FileNotFoundError):
                return read_file(self.path, limit=MOST_BYTES)
            time.sleep(_LOOK_SECONDS)
        return read_file(self.path, limit=MOST_BYTES)

    def check_now_and_then(self) -> None:
        """The same, once in two seconds at most."""
        self.check_known()
        if time.monotonic() - self._checked > _EVERY_SECONDS:
            self.check()

    def check_known(self) -> None:
        """The same, from what earlier checks have found: for loops that must not wait for storage."""
        if self._lost:
            raise TakenOverError(self._lost)

    def lost(self) -> bool:
        """Whether the run is another command's: a check that does not raise."""
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
    """The lease that this process has on the run with this lock; None if it has none."""
    return _held.get(path)
