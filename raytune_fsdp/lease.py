"""Whether a run is still this command's: another one takes it over where the first gives no sign of life.

`lock` in the run's directory says whose the run is, and is never changed but by taking it over. So whoever writes for
the run asks it first: a process that was stopped for a while may wake up in a run that has gone on without it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from raytune_fsdp.errors import TrainingError
from raytune_fsdp.untrusted import read_file

MOST_BYTES = 1000
_EVERY_SECONDS = 2.0

_held: dict[Path, Lease] = {}
"""Those of this process, by the lock's path."""


class TakenOverError(TrainingError):
    """Another command works on the run now."""


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
        try:
            found = json.loads(read_file(self.path, limit=MOST_BYTES))
        except FileNotFoundError:
            found = {}
        except (OSError, ValueError):
            return
        if not isinstance(found, dict) or found.get("token") != self.token:
            self._lost = (
                f"{self.path} is not this command's any more: another one has taken the run over, as this one gave no "
                "sign of life; what is saved is saved, and this command writes nothing more"
            )
        self._checked = time.monotonic()
        self.check_known()

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
