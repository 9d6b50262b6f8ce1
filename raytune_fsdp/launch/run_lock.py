"""Let one command at a time work on a run: a file in its directory says which, and another that it is alive.

If the storage has locks, a command that crashes releases the lock at once. If it has none, or the process is stopped,
or its machine is lost, its beats decide: if a newcomer waits for five beats in vain, it takes the run. No clock is
asked. A command that wakes up later learns from its lease (lease.py) that it lost the run, and ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.lease import MOST_BYTES, Lease, hold, release
from raytune_fsdp.base.machine import this_node
from raytune_fsdp.base.untrusted import UnsoundError, is_count, open_regular, read_file, reason
from raytune_fsdp.checkpoint.on_demand import forget_stops
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
_MISSED, _CONFIRMED = 5, 1.5
"""Beats that a newcomer waits for: if nothing else tells, and if the lock is free, but may be held in another mount."""
_LOOK_SECONDS = 0.2
_SETTLED_SECONDS = 0.5
"""How long a newcomer waits before it checks that the lock is its own: another newcomer may have replaced the file."""
# Errors of file systems without locks: NFS without a lock daemon, and mounted object stores.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_NO_PLACE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
"""Errors that say that nothing can be written there, and waiting does not change that: who writes reports it."""


@dataclass(slots=True)
class _Held:
    handle: int
    """The open file, with its lock if the storage has locks."""
    lease: Lease
    stop: Event


_held: dict[Path, _Held] = {}


def _close_in_child() -> None:
    # The lock belongs to the open file, which a fork shares: a child that outlives the command would keep it. In
    # programs that are started the file is closed (O_CLOEXEC, Python's default).
    for path, held in _held.items():
        os.close(held.handle)
        release(path)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(config: FinetuneConfig) -> Iterator[None]:
    """Hold the run's lock while the context lasts. Refuses if another command has it, and then leaves nothing."""
    place = RunDir.of(config)
    missing: list[Path] = []
    with suppress(OSError):
        missing += [each for each in (place.path, *place.path.parents) if not each.exists()]
    held = _take(config, place)
    if held is None:
        yield
        return
    _held[place.lock] = held
    hold(held.lease)
    try:
        forget_stops(place.path)
        try:
            _write_beat(place, held.lease, 0)
        except OSError as error:  # without beats, a newcomer would take the run from this command
            raise _unusable(config, place.beat, error) from error
        Thread(target=_beat, args=(place, held), name="lease", daemon=True).start()
        yield
    finally:
        if place.lock in _held:  # not in a fork of the command
            del _held[place.lock]
            held.stop.set()
            release(place.lock)
            with suppress(OSError):
                # Only if the file there is ours: a person may have removed it, and another command made a new one.
                if os.path.samestat(os.fstat(held.handle), place.lock.stat()):
                    with suppress(OSError):
                        place.beat.unlink()
                    # Still locked: a newcomer that waits for this file sees that it is gone, and makes one.
                    place.lock.unlink()
            for directory in missing:
                with suppress(OSError):
                    directory.rmdir()  # only if nothing was written there
            os.close(held.handle)


class Signs:
    """Finds out whether a command works on a run, without taking the lock.

    Only a command that beats is alive: clocks of other machines are not asked.
    """

    def __init__(self, place: RunDir) -> None:
        self._place = place
        self._last: tuple[object, bytes] | None = None
        """The owner of the lock and the beat, at the last look."""
        self._heard_at = 0.0
        self._alive = False

    @property
    def owner(self) -> str | None:
        """The token of the command that had the lock at the last look; None if none had, or it has no token."""
        owner = self._last[0] if self._last is not None else None
        return owner if isinstance(owner, str) else None

    def look(self) -> Literal["running", "silent", "free"] | None:
        """Look once. `silent`: the lock is there, but its command gives no sign of life.

        None: not known yet; look again, now and then, for as long as a newcomer would wait.
        """
        if not os.path.lexists(self._place.lock):
            self._last = None
            return "free"
        found = _content(self._place.lock)
        if _has_ended(found):
            self._last = (found.get("token"), b"")
            return "silent"
        try:
            beat = read_file(self._place.beat, limit=MOST_BYTES)
        except (OSError, UnsoundError):
            beat = b""
        now, owner = time.monotonic(), found.get("token")
        if self._last != (owner, beat):
            self._alive = self._last is not None and self._last[0] == owner
            self._last, self._heard_at = (owner, beat), now
        if now - self._heard_at > _MISSED * BEAT_SECONDS:
            return "silent"
        return "running" if self._alive else None


def _beat(place: RunDir, held: _Held) -> None:
    """Show that this process is alive, as long as the run is its own.

    Storage may hang for ever: code that must not wait for it asks the lease what this thread found
    (`Lease.check_known`).
    """
    count = 0
    while not held.stop.wait(BEAT_SECONDS) and not held.lease.lost():
        count += 1
        with suppress(OSError):
            _write_beat(place, held.lease, count)


def _write_beat(place: RunDir, lease: Lease, count: int) -> None:
    line = f"{lease.token} {count:012d}\n".encode()
    try:
        # One short write in place: a reader sees the beat before or this one. Not a new file each time, which NFS may
        # show to others only after 30 s (acdirmin).
        file = open_regular(place.beat, write=True)
    except (OSError, UnsoundError):
        # The first beat, or something that is not ours: a pipe, a link, another user's file. A new file replaces it,
        # unless it is a directory.
        replace_at_once(place.beat, line)
        return
    try:
        os.write(file, line)
    finally:
        os.close(file)


def _take(config: FinetuneConfig, place: RunDir) -> _Held | None:
    """Take the run's lock; None if nothing can be written there, which is reported later."""
    token = secrets.token_hex(16)
    own = place.lock.with_name(f"{place.lock.name}.{token}")
    try:
        place.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno in _NO_PLACE:
            return None
        raise _unusable(config, place.lock, error) from error  # once there is room, it would train without a lock
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
        content |= {"boot": _boot(), "namespace": _namespace(), "token": token}
        try:
            os.write(handle, json.dumps(content).encode())
            os.fsync(handle)
        except OSError as error:
            raise _unusable(config, place.lock, error) from error
        _lock(handle)
        if not _publish(config, place, own):
            time.sleep(_SETTLED_SECONDS)
            if _content(place.lock).get("token") != token:
                raise _refusal(config, place)
    except BaseException:
        own.unlink(missing_ok=True)
        with suppress(OSError):
            place.path.rmdir()
        os.close(handle)
        raise
    return _Held(handle, Lease(place.lock, token), Event())


def _publish(config: FinetuneConfig, place: RunDir, own: Path) -> bool:
    """Give our file the lock's name. Returns True if there was no lock, False if it replaced a silent command's."""
    while True:
        try:
            os.link(own, place.lock)  # fails if the lock exists: only one of several newcomers can make it
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not place.lock.exists():
                os.rename(own, place.lock)
                return False
        else:
            own.unlink()
            return True
        if _is_given_up(config, place):
            os.rename(own, place.lock)
            return False


def _is_given_up(config: FinetuneConfig, place: RunDir) -> bool:
    """Return whether the existing lock can be taken: its process has ended, or gives no sign of life.

    Refuses if it does give one. Returns False if the lock has gone meanwhile.
    """
    handle = _open_lock(config, place)
    if handle is None:
        return False
    try:
        found = _content(place.lock)
        # A lock in this machine's kernel tells whether the process lives; one in another machine's may not be visible.
        # Earlier versions write neither token nor beats: for them only the lock tells anything, and silence nothing.
        old = "token" not in found
        free = _lock(handle) if old or found.get("boot") == _boot() else None
        if old and free is False:
            raise _refusal(config, place, f"; if its machine is lost, remove {place.lock}")
        if not free:
            _listen(config, place, _MISSED * BEAT_SECONDS)
        elif not (_has_ended(found) or (old and not _beats(config, place))):
            # Each container may have a mount of its own (s3fs, gcsfuse), and such a mount knows only its own locks.
            _listen(config, place, _CONFIRMED * BEAT_SECONDS)
        with suppress(OSError):  # another newcomer may have taken the lock just now
            return os.path.samestat(os.fstat(handle), place.lock.stat())
        return False
    finally:
        os.close(handle)


def _listen(config: FinetuneConfig, place: RunDir, seconds: float) -> None:
    """Wait for a beat, and refuse if there is one. Returns early if the lock is gone."""
    first, began, said = _beats(config, place), time.monotonic(), False
    while time.monotonic() - began < seconds:
        time.sleep(_LOOK_SECONDS)
        if not place.lock.exists():
            return
        if _beats(config, place) != first:
            raise _refusal(config, place)
        if not said and time.monotonic() - began > 2 * BEAT_SECONDS:
            said = True
            logger.warning(
                "run.name=%s: %s has not been heard of; if it stays silent for %.0f s, this command takes the run",
                config.run.name, holder_of(place) or "the command that works on it", seconds,
            )  # fmt: skip


def _has_ended(found: Mapping[str, Any]) -> bool:
    """Return whether the process that signed the lock has certainly ended. False may also mean: not known.

    At any time, no two PID namespaces of a machine have the same number. If ours has the number of the holder's, either
    it is the same, and we would see the process; or the holder's has ended, and with it every process in it. On all
    machines the first namespace has the same number, so it must have been this one, since it was started.
    """
    pid, namespace = found.get("pid"), found.get("namespace")
    if not this_node()[1] or found.get("boot") != _boot():
        return False
    if namespace is None or namespace != _namespace() or not is_count(pid) or not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def _namespace() -> str | None:
    """Return the PID namespace of this process: process ids mean the same only within one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _open_lock(config: FinetuneConfig, place: RunDir) -> int | None:
    """Open the existing lock; None if it is gone."""
    try:
        try:
            return open_regular(place.lock, write=True)  # NFS locks no file that is open for reading only
        except PermissionError:
            return open_regular(place.lock)  # the lock of another user who shares the directory
    except FileNotFoundError:
        return None
    except (OSError, UnsoundError) as error:
        raise _unusable(config, place.lock, error) from error


def _boot() -> str:
    """Return an id of this machine's start, rather than its name, which containers of one image may share."""
    name, boot = this_node()
    return boot or name


def _lock(handle: int) -> bool | None:
    """Lock the open file. Returns False if another process has the lock, None if the storage has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _refusal(config: FinetuneConfig, place: RunDir, more: str = "") -> ConfigError:
    holder = holder_of(place)
    return ConfigError(
        f"run.name={config.run.name}: another command works on {place.path}{holder and ': '}{holder}; wait for its "
        f"end, stop it, or choose another run.name{more}"
    )


def _unusable(config: FinetuneConfig, path: Path, error: Exception) -> ConfigError:
    """Return the error about a file that has the name of one of ours, but cannot be used as one."""
    return ConfigError(
        f"run.name={config.run.name}: {path} says which command works on the run, and cannot be used: {reason(error)}; "
        "make room if the disk is full; otherwise make sure that no command works on the run, and remove it"
    )


def _beats(config: FinetuneConfig, place: RunDir) -> bytes:
    """Return the last beat, or nothing. Refuses if it cannot be read, which is not the same as silence."""
    try:
        return read_file(place.beat, limit=MOST_BYTES)
    except FileNotFoundError:
        return b""
    except (OSError, UnsoundError) as error:
        raise _unusable(config, place.beat, error) from error


def _content(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(read_file(path, limit=MOST_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def holder_of(place: RunDir) -> str:
    """Say for a message which process has the lock; an empty text if the file does not say."""
    found = _content(place.lock)
    with suppress(TypeError, ValueError, KeyError):
        text = f"process {int(found['pid'])} on {str(found['host'])[:80]}, since {str(found['since'])[:30]}"
        return text if text.isprintable() else ""
    return ""
