"""What a node's actor knows of the ranks there. No Ray is started: the processes are real, the actor is an object."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from raytune_fsdp import machine
from raytune_fsdp.launch.ray import node_watch
from raytune_fsdp.launch.ray.node_watch import _NodeWatch

WAITS = "import sys; sys.stdin.read()"


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many processes the control group of every process here has lost, in either version."""
    monkeypatch.setattr(node_watch, "_LOOK_SECONDS", 0.05)
    names = {"_V2": ("memory.max", "memory.events"), "_V1": ("memory.limit_in_bytes", "memory.oom_control")}
    for version, (limit, _) in names.items():
        monkeypatch.setattr(machine, version, tmp_path / version)
        (tmp_path / version).mkdir()
        (tmp_path / version / limit).write_text("2000000000\n")

    def lost(count: int) -> None:
        for version, (_, kills) in names.items():
            (tmp_path / version / kills).write_text(f"oom_kill {count}\n")

    lost(0)
    return lost


def looked_at(watch: _NodeWatch, pid: int) -> None:
    """Wait until all looks that are kept are newer than now."""
    last = watch._kills.get(pid)
    for _ in range(node_watch._KEPT_LOOKS + 1):
        while watch._kills.get(pid) is last:
            time.sleep(0.01)
        last = watch._kills[pid]


def test_a_kill_long_before_says_nothing_about_a_death(
    rank: subprocess.Popen[bytes], full: Callable[[int], None]
) -> None:
    """The kernel ends a process of the data, hours before an operator ends the rank."""
    watch = _NodeWatch([rank.pid])
    looked_at(watch, rank.pid)
    full(1)
    looked_at(watch, rank.pid)
    rank.kill()
    rank.wait()
    assert watch.out_of_memory(rank.pid) is None


def test_a_kill_that_is_counted_before_the_process_has_gone(
    rank: subprocess.Popen[bytes], full: Callable[[int], None]
) -> None:
    """One of many GB takes a while to end after the kernel has counted it; nothing counts after that."""
    watch = _NodeWatch([rank.pid])
    looked_at(watch, rank.pid)
    full(1)
    time.sleep(2 * node_watch._LOOK_SECONDS)
    rank.kill()
    rank.wait()
    time.sleep(2 * node_watch._KEPT_LOOKS * node_watch._LOOK_SECONDS)
    said = watch.out_of_memory(rank.pid)
    assert said is not None and re.fullmatch(r"it had 0\.0\d GB, and its control group may have 2\.00 GB", said)
