"""How somebody asks a training run for a checkpoint now, or to stop: a small file in the run directory.

checkpoint-now.<id>.asked      left by `raytune-fsdp checkpoint now`
checkpoint-now.<id>.taken      the run saves after this step
checkpoint-now.<id>.answered   the outcome, as JSON
stop.<id>.asked                left by `raytune-fsdp stop`, or by the program that called `finetune`; in it, from the
                               run's lock, the token of the command that is meant
"""

from __future__ import annotations

import json
import stat
import time
import uuid
from contextlib import suppress
from pathlib import Path

from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.base.lease import MOST_BYTES
from raytune_fsdp.base.untrusted import read_file

_PREFIX = "checkpoint-now."
_STOP = "stop."
_ASKED, _TAKEN, _ANSWERED = ".asked", ".taken", ".answered"
_LOOK_SECONDS = 1.0
"""The shortest time between two looks: on a network file system, listing a directory in every step would be felt."""


class Requests:
    """The run's side of the requests."""

    def __init__(self, run_dir: Path, token: str = "") -> None:
        """`token`: that of the command which works on the run."""
        self._run_dir = run_dir
        self._token = token
        self._looked = 0.0
        self._taken: list[Path] = []
        self._waiting = self._stopping = False
        for taken in run_dir.glob(f"{_PREFIX}*{_TAKEN}"):  # by an attempt that ended before it could answer
            with suppress(OSError):
                taken.rename(taken.with_suffix(_ASKED))

    def waiting(self) -> bool:
        """Return whether someone is asking for a checkpoint."""
        self._look()
        return self._waiting

    def stopping(self) -> bool:
        """Return whether someone asks the run to stop."""
        self._look()
        return self._stopping

    def _look(self) -> None:
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._waiting = any(self._run_dir.glob(f"{_PREFIX}*{_ASKED}"))
            self._stopping = is_asked_to_stop(self._run_dir, self._token)

    def take(self) -> None:
        """Take all requests so far: the save that begins answers them."""
        self._waiting = False
        for asked in self._run_dir.glob(f"{_PREFIX}*{_ASKED}"):
            taken = asked.with_suffix(_TAKEN)
            with suppress(OSError):  # whoever asked may have given up
                asked.rename(taken)
                self._taken.append(taken)

    def answer(self, step: int, path: str | None, problem: str | None) -> None:
        """Answer the requests that were taken."""
        text = json.dumps({"step": step, "path": path, "problem": problem})
        for taken in self._taken:
            with suppress(OSError):
                # Whoever asked may have given up and removed it, and may be a user whose files this one cannot write.
                if stat.S_ISREG(taken.lstat().st_mode):
                    replace_at_once(taken.with_suffix(_ANSWERED), text.encode())
                    taken.unlink()
        self._taken.clear()


def is_asked_to_stop(run_dir: Path, token: str) -> bool:
    """Return whether somebody asks the command with this token to stop."""
    for asked in run_dir.glob(f"{_STOP}*{_ASKED}"):
        with suppress(OSError, ValueError):  # withdrawn just now, or none of ours
            if read_file(asked, limit=MOST_BYTES).decode() == token:
                return True
    return False


class StopRequest:
    """A person's side of a request to stop."""

    def __init__(self, run_dir: Path, token: str) -> None:
        """`token`: that of the command which is meant. One that takes the run over later is not."""
        self._file = run_dir / f"{_STOP}{uuid.uuid4().hex[:12]}{_ASKED}"
        self._token = token

    def ask(self) -> None:
        if not self._file.exists():
            replace_at_once(self._file, self._token.encode())
            self._file.chmod(0o644)  # the run may be another user's, and so may the umask

    def leave(self) -> None:
        """Withdraw the request."""
        with suppress(OSError):
            self._file.unlink()


def forget_stops(run_dir: Path) -> None:
    """Remove requests that somebody has left who was killed."""
    with suppress(OSError):
        for asked in run_dir.glob(f"{_STOP}*{_ASKED}"):
            asked.unlink()


class Asking:
    """A person's side of a request for a checkpoint."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / f"{_PREFIX}{uuid.uuid4().hex[:12]}{_ASKED}"

    def ask(self) -> None:
        self._file.touch()

    def taken(self) -> bool:
        """Return whether the run has taken the request."""
        return not self._file.exists()

    def answer(self) -> dict[str, object] | None:
        """Return step, path and problem, once they are known."""
        answered = self._file.with_suffix(_ANSWERED)
        if not answered.exists():
            return None
        found: dict[str, object] = json.loads(answered.read_text())
        answered.unlink()
        return found

    def leave(self) -> None:
        """Withdraw the request."""
        for suffix in (_ASKED, _TAKEN, _ANSWERED):
            with suppress(OSError):  # there is none, or none could be left: the directory is read-only
                self._file.with_suffix(suffix).unlink()
