"""What a process can know of its machine: which one it is, how much memory it may have, and what is free on disks."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Its content differs on every machine, and after every boot."""
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_UNLIMITED = 1 << 60  # version 1 expresses "no limit" by a number of about this size


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group (cgroup) of a process that has a limit of memory."""

    limit: int
    """The limit in bytes."""
    kills_file: Path
    taken_file: Path
    taken_keys: tuple[str, str]

    def kills(self) -> int:
        """Return how many of its processes the kernel has killed because the group was full."""
        with suppress(OSError, ValueError):
            for line in self.kills_file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0

    def taken(self) -> int:
        """Return the bytes that count against the limit and, unlike the file cache, cannot be freed; 0 if unknown."""
        with suppress(OSError, ValueError, KeyError):
            lines = dict(line.split() for line in self.taken_file.read_text().splitlines())
            return sum(int(lines[key]) for key in self.taken_keys)
        return 0


def this_node() -> tuple[str, str]:
    """Return host name and boot id, which are equal for processes that share memory.

    The name alone may be that of several machines ("localhost", "ubuntu"). Containers of one machine have different
    names, and each may have a limit of its own.
    """
    try:
        boot = _BOOT.read_text().strip()
    except OSError:  # not Linux, or hidden from the container
        boot = ""
    return socket.gethostname(), boot


def began(pid: int) -> int | None:
    """Return when a process began, in ticks since its machine did: setting a clock changes nothing. None: unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def processor() -> str | None:
    """Return the name of this machine's processor; None where the kernel does not tell."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None


def free_memory() -> int:
    """Return how many bytes this process and its neighbours may still take: the machine's, or its groups' if less."""
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *(group.limit - group.taken() for group in _groups_of(os.getpid()))]))


def group_of(pid: int) -> ControlGroup | None:
    """Return the control group of a process with the lowest limit; None if no limit is set, or none can be read."""
    return min(_groups_of(pid), key=lambda group: group.limit, default=None)


def _groups_of(pid: int) -> list[ControlGroup]:
    """Return the control groups of a process that have a limit."""
    found: list[ControlGroup] = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found += _limits(_V2, path, "memory.max", "memory.events", ("anon", "shmem"))
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.oom_control")
                found += _limits(_V1, path, *names, ("total_rss", "total_shmem"))
    return found


def _limits(root: Path, path: str, limit: str, kills: str, taken: tuple[str, str]) -> list[ControlGroup]:
    here = root / path.lstrip("/")
    found = []
    # In a container the path is the host's; the container's own group is then at the root.
    for place in (here, *here.parents, root):
        if not place.is_relative_to(root):
            break
        with suppress(OSError, ValueError):
            number = int((place / limit).read_text())  # "max" is none
            if number < _UNLIMITED:
                found.append(ControlGroup(number, place / kills, place / "memory.stat", taken))
    return found


def nearest_existing(path: Path) -> Path:
    """Return the path, or the innermost directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def free_space(path: Path) -> int:
    """Return how many bytes are free where a path is, or would be made. Raises OSError."""
    return shutil.disk_usage(nearest_existing(path)).free
