"""What a node's actor knows of the ranks there. No Ray is started: the processes are real, the actor is an object."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

from raytune_fsdp.base import machine
from raytune_fsdp.base.machine import began
from raytune_fsdp.launch.ray.board import Board, Joined
from raytune_fsdp.launch.ray.nodes import node_watch
from raytune_fsdp.launch.ray.nodes.node_watch import NodeWatches, _NodeWatch
from raytune_fsdp.launch.ray.watch.hangs import culprit, waits_for_storage

RANK = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True); input()"


def started() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with started() as process:
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


def test_of_ranks_without_logs_it_is_known_whether_they_are_stopped(
    rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are waiting for each other, and have nowhere to write a stack."""
    monkeypatch.setattr(node_watch, "_ANSWER_SECONDS", 0.1)
    with started() as other:
        rank.send_signal(signal.SIGSTOP)
        while psutil.Process(rank.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        watch = _NodeWatch({0: rank.pid, 1: other.pid})
        found = watch.stacks({0: other.pid, 1: rank.pid}, None)
        assert found[0] == "" and found[1].startswith("State:\tT (stopped)")
        assert culprit(found) == (1, "its process takes no signals (T (stopped))")
        watch.kill([rank.pid])
        assert rank.wait(10) == -signal.SIGKILL and other.poll() is None
        other.kill()


READS = """
import faulthandler, os, signal, sys, threading
log = open(sys.argv[1], "w")
faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)

def train_rank():
    # Who starts a process waits in the kernel until that runs; this one first waits for somebody to write.
    opened = (os.POSIX_SPAWN_OPEN, 0, sys.argv[2], os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opened])

threading.Thread(target=train_rank).start()
"""


@pytest.mark.parametrize("logs", [True, False])
def test_a_rank_whose_thread_waits_in_the_kernel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: subprocess.Popen[bytes], logs: bool
) -> None:
    """As for a mount that is away. The process itself takes signals: the thread that trains is another one."""
    monkeypatch.setattr(node_watch, "_ANSWER_SECONDS", 0.3)
    os.mkfifo(tmp_path / "pipe")
    log, pipe = tmp_path / "rank-0.log", str(tmp_path / "pipe")
    with subprocess.Popen([sys.executable, "-c", READS, str(log), pipe]) as process:
        try:
            tasks = Path(f"/proc/{process.pid}/task")
            while not any("State:\tD" in (each / "status").read_text() for each in tasks.iterdir()):
                time.sleep(0.01)
            watch = _NodeWatch({0: process.pid, 1: rank.pid})
            found = watch.stacks({0: process.pid, 1: rank.pid}, str(tmp_path) if logs else None)
        finally:
            open(pipe, "w").close()  # until then it cannot be ended either
        assert process.wait(10) == 0
    assert waits_for_storage(found[0]) and not waits_for_storage(found[1])
    assert ("in train_rank" in found[0]) == logs


def test_a_kill_long_before_says_nothing_about_a_death(
    rank: subprocess.Popen[bytes], full: Callable[[int], None]
) -> None:
    """The kernel ends a process of the data, hours before an operator ends the rank."""
    watch = _NodeWatch({0: rank.pid})
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
    watch = _NodeWatch({0: rank.pid})
    looked_at(watch, rank.pid)
    full(1)
    while watch._kills[rank.pid][1][-1] != 1:  # a look has seen it
        time.sleep(0.001)
    rank.kill()
    rank.wait()
    time.sleep(2 * node_watch._KEPT_LOOKS * node_watch._LOOK_SECONDS)
    said = watch.out_of_memory(rank.pid)
    assert said is not None and re.fullmatch(r"it had 0\.0\d GB, and its control group may have 2\.00 GB", said)


class Remote:
    """As Ray runs an actor: so many calls at a time, the others wait."""

    def __init__(self, actor: Any, calls: int) -> None:
        self._actor, self._threads = actor, ThreadPoolExecutor(calls)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._threads.submit(getattr(self._actor, name), *given))


def test_ranks_are_ended_while_their_storage_hangs(
    tmp_path: Path, rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens this log waits for another process to write to it."""
    os.mkfifo(tmp_path / "rank-0.log")
    monkeypatch.setattr(node_watch, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(node_watch, "_START_SECONDS", 0.5)

    def started_on(node: str, kind: Any, *given: Any) -> Remote:
        return Remote(_NodeWatch(*given), kind._default_options["max_concurrency"])

    def wait(asked: list[Future[Any]], num_returns: int, timeout: float) -> Any:
        done, rest = futures.wait(asked, timeout)
        return list(done), list(rest)

    monkeypatch.setattr(node_watch, "started_on", started_on)
    monkeypatch.setattr(node_watch, "ray", SimpleNamespace(wait=wait, get=Future.result))
    watches = NodeWatches("none", Board.__new__(Board))
    ranks = {0: Joined(0, "here", "node", rank.pid)}
    assert watches.stacks(ranks, str(tmp_path)) == {}
    assert watches.wait(ranks, 0.6) == ["node"], "it is still there, and would share a GPU with the next attempt"
    watches.kill(ranks)
    try:
        assert watches.wait(ranks, 10) == []
        assert rank.wait(timeout=10) == -signal.SIGKILL
    finally:
        (tmp_path / "rank-0.log").open("wb").close()  # lets the other call end


def test_a_process_that_began_at_another_time_than_the_rank_is_left_alone(
    rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has ended before there was a watch, and another process has its number."""
    given: list[Any] = []
    monkeypatch.setattr(node_watch, "started_on", lambda node, kind, *those: given.append(those))
    now = began(rank.pid)
    assert now is not None
    for then in (now - 1, now):
        NodeWatches("none", Board.__new__(Board)).start({0: Joined(0, "here", "node", rank.pid, began=then)})
    other, same = (_NodeWatch(ranks, None, begun) for ranks, _, begun in given)
    other.kill([rank.pid])
    assert other.gone([rank.pid], 0)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(timeout=0.3)
    assert not same.gone([rank.pid], 0)
    same.kill([rank.pid])
    assert rank.wait(timeout=10) == -signal.SIGKILL


def test_a_process_that_has_got_the_number_of_a_rank_is_left_alone() -> None:
    """A kill may come late. The number of the next process can be chosen as root."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    rank = subprocess.Popen([sys.executable, "-c", ""])
    watch = _NodeWatch({0: rank.pid})
    rank.wait()
    for _ in range(50):
        try:
            last.write_text(str(rank.pid - 1))
        except OSError:
            pytest.skip("only root can choose a process's number")
        other = started()
        if other.pid == rank.pid:
            break
        other.kill()
        other.wait()
    else:
        pytest.skip("other processes start too often here")
    watch.kill([rank.pid])
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=0.5)
    _NodeWatch({0: other.pid}).kill([other.pid])
    assert other.wait(timeout=10) == -signal.SIGKILL
