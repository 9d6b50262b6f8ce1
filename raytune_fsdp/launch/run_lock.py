"""One command at a time works on a run: a lock on a file in its directory, which a crash of the command releases."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.rundir import RunDir

logger = logging.getLogger(__name__)

# What file systems answer that have no locks: NFS without a lock daemon, and mounted object stores.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_TRIES, _PAUSE_SECONDS = 50, 0.1  # while others remove the file and make it anew
_MOST_BYTES = 1000  # read of a lock file, which anyone may have written

_held: dict[Path, int] = {}


def _close_in_child() -> None:
    # The lock belongs to the open file, which a fork shares: a child that outlives the command would keep it. Programs
    # that are started close it by themselves (O_CLOEXEC, which is Python's default).
    for handle in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(config: FinetuneConfig) -> Iterator[None]:
    """Hold the run's lock inside the block. Refuses if another command has it; a refusal leaves nothing behind."""
    place = RunDir.of(config)
    missing: list[Path] = []
    with suppress(OSError):
        missing += [each for each in (place.path, *place.path.parents) if not each.exists()]
    handle = _take(config, place)
    if handle is None:
        yield
        return
    _held[place.lock] = handle
    try:
        yield
    finally:
        if place.lock in _held:  # not in a fork of the command
            _release(place, missing)


def is_locked(place: RunDir) -> bool:
    """Whether this process has the lock of the run: then no other command works on it."""
    return place.lock in _held


def _release(place: RunDir, made: list[Path]) -> None:
    with suppress(OSError):
        # Unless a person has removed ours, and another command has the one that is there.
        if os.path.samestat(os.fstat(_held[place.lock]), place.lock.stat()):
            place.lock.unlink()  # still locked: whoever waits for this file finds that it has gone, and makes another
    for directory in made:
        with suppress(OSError):
            directory.rmdir()  # only if nothing was written there
    os.close(_held.pop(place.lock))


def _take(config: FinetuneConfig, place: RunDir) -> int | None:
    """The open and locked file; None where that is impossible. Storage that cannot be written is reported later."""
    for _ in range(_TRIES):
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            handle = _open(place.lock)
        except FileNotFoundError:  # the command before us has just removed the directory
            time.sleep(_PAUSE_SECONDS)
            continue
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), place.lock.stat()):
                with suppress(OSError):
                    _sign(handle)
                return handle
        except FileNotFoundError:  # as above: what we have locked is a file that nobody can find
            pass
        except OSError as error:
            holder = _holder(handle)
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"run.name={config.run.name}: another command works on {place.path}{holder}; wait for its end, "
                    f"stop it, or choose another run.name; if its machine is lost, remove {place.lock}"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            _warn(config, error.strerror)
            return None
        os.close(handle)
        time.sleep(_PAUSE_SECONDS)
    _warn(config, "a file that was made there is not there")
    return None


def _warn(config: FinetuneConfig, why: str | None) -> None:
    logger.warning(
        "run.storage=%s: this storage has no locks (%s), so nothing prevents a second start of %s while this one runs, "
        "which would damage the run",
        config.run.storage, why, config.run.name,
    )  # fmt: skip


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # another user's, who shares the directory


def _sign(handle: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now}).encode())


def _holder(handle: int) -> str:
    """Who has the lock, for a message; nothing if the file does not say."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(os.pread(handle, _MOST_BYTES, 0))
        text = f": process {int(found['pid'])} on {str(found['host'])[:80]}, since {str(found['since'])[:30]}"
        return text if text.isprintable() else ""
    return ""
