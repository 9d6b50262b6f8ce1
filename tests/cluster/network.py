"""A network of machines on this one: network namespaces with addresses of their own, which can be cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Why there can be no such network here; None if there can."""
    try:
        Network(1).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces can be made here: {getattr(error, 'stderr', None) or error}".strip()
    return None


def wait(condition: Callable[[], bool], seconds: float, say: Callable[[], str] = str) -> None:
    """Until it holds; a failure says what `say` knows then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {say()}"
        time.sleep(0.2)


class Network:
    """Machines 0, 1, … with an `eth0` each, joined by a bridge that lies in a namespace of its own."""

    def __init__(self, machines: int) -> None:
        self.name = f"rt{os.getpid()}"
        self._hub = f"{self.name}-hub"
        self._all: list[str] = []
        try:
            self._add(self._hub)
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            for machine in range(machines):
                self._join(machine)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self._all.append(name)

    def _join(self, machine: int) -> None:
        own, cable = self._namespace(machine), f"cable{machine}"
        self._add(own)
        _ip("-n", self._hub, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", own)
        _ip("-n", self._hub, "link", "set", cable, "master", "bridge", "up")
        for device in ("lo", "eth0"):
            _ip("-n", own, "link", "set", device, "up")
        _ip("-n", own, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")

    def _namespace(self, machine: int) -> str:
        return f"{self.name}-{machine}"

    @staticmethod
    def address(machine: int) -> str:
        return f"10.231.0.{machine + 1}"

    def start(
        self, machine: int, *command: str, binds: Mapping[Path, Path] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A command on a machine. In `binds`, what it sees in a place: another directory."""
        mounts = [f"mount --bind {there} {place}" for place, there in (binds or {}).items()]
        script = " && ".join([*mounts, 'exec "$@"'])
        # Not `ip netns exec`, which mounts /sys anew, without the cgroups that Ray reads.
        enter = [
            "nsenter",
            f"--net=/var/run/netns/{self._namespace(machine)}",
            "unshare",
            "--mount",
            "sh",
            "-ec",
            script,
        ]
        return subprocess.Popen([*enter, "sh", *command], text=True, start_new_session=True, **options)

    def cut(self, machine: int) -> None:
        _ip("-n", self._hub, "link", "set", f"cable{machine}", "down")

    def mend(self, machine: int) -> None:
        _ip("-n", self._hub, "link", "set", f"cable{machine}", "up")

    def hide(self, machine: int, other: int) -> None:
        """Let a machine not reach another one any more."""
        _ip("-n", self._namespace(machine), "route", "add", "unreachable", f"{self.address(other)}/32")

    def pids(self, machine: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self._namespace(machine)).split()]

    def close(self) -> None:
        """End what runs on the machines, and remove them."""
        for name in reversed(self._all):
            deadline = time.monotonic() + 10
            while (left := _ip("netns", "pids", name).split()) and time.monotonic() < deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.1)
            _ip("netns", "del", name)
        self._all.clear()
