"""The memory that the kernel lets a process have: its control group's limit, and how often that has cost a process."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_UNLIMITED = 1 << 60  # version 1 says "no limit" by a number of about this size


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group of a process that has the lowest limit: itself, or one that it is in."""

    limit: int
    """Bytes."""
    kills_file: Path

    def kills(self) -> int:
        """Processes of it that the kernel has ended because it was full."""
        with suppress(OSError, ValueError):
            for line in self.kills_file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def group_of(pid: int) -> ControlGroup | None:
    """That of a process; None if no limit is set, or none can be read."""
    found = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found += _limits(_V2, path, "memory.max", "memory.events")
            elif "memory" in controllers.split(","):
                found += _limits(_V1, path, "memory.limit_in_bytes", "memory.oom_control")
    return min(found, key=lambda group: group.limit, default=None)


def _limits(root: Path, path: str, limit: str, kills: str) -> list[ControlGroup]:
    here = root / path.lstrip("/")
    found = []
    # In a container the path is that of the host; its own group is then at the root.
    for place in (here, *here.parents, root):
        if not place.is_relative_to(root):
            break
        with suppress(OSError, ValueError):
            number = int((place / limit).read_text())  # "max" is none
            if number < _UNLIMITED:
                found.append(ControlGroup(number, place / kills))
    return found
