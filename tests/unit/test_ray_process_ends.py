"""A watch hears that a process has ended, and how, without being its parent. The processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from queue import Queue

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray.nodes import process_ends
from raytune_fsdp.launch.ray.nodes.process_ends import ProcessEnds, in_words

PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as Ray's raylet does: nobody asks for the end of its children
for _ in range(3):
    print(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).pid, flush=True)
input()
"""


@pytest.fixture
def grandchildren() -> Iterator[list[int]]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        yield [int(parent.stdout.readline()) for _ in range(3)]
        parent.kill()


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "looks"])
def test_the_end_of_a_grandchild_is_heard_at_once(
    grandchildren: list[int], monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    heard: Queue[tuple[int, str | None]] = Queue()
    ends = ProcessEnds(grandchildren, lambda *end: heard.put(end))
    one, two, three = grandchildren
    assert not ends.wait([one], 0.1) and heard.empty()
    os.kill(two, signal.SIGSTOP)  # which is no end
    began = time.monotonic()
    os.kill(one, signal.SIGKILL)
    pid, how = heard.get(timeout=10)
    assert pid == one and how in ("killed by SIGKILL", None) and time.monotonic() - began < 5
    assert ends.wait([one], 0) and not ends.wait(grandchildren, 0)
    os.kill(two, signal.SIGKILL)  # also of a stopped process
    os.kill(three, signal.SIGSEGV)
    assert ends.wait(grandchildren, 10)
    last = dict(heard.get(timeout=10) for _ in range(2))
    assert last.keys() == {two, three} and last[three] in ("crashed: SIGSEGV", None)


def test_the_kernel_tells_how_where_it_can(grandchildren: list[int]) -> None:
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 15):
        pytest.skip("before Linux 6.15 only the parent can know")
    heard: Queue[tuple[int, str | None]] = Queue()
    ProcessEnds(grandchildren, lambda *end: heard.put(end))
    os.kill(grandchildren[1], signal.SIGTERM)
    assert heard.get(timeout=10) == (grandchildren[1], "killed by SIGTERM")


def test_a_process_that_is_not_there_has_not_ended() -> None:
    """Its number may be that of another namespace: Ray Train finds out."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    heard: Queue[tuple[int, str | None]] = Queue()
    ends = ProcessEnds([gone.pid], lambda *end: heard.put(end))
    assert ends.wait([gone.pid], 10) and heard.empty()


@pytest.mark.parametrize(
    ("status", "words"),
    [(9, "killed by SIGKILL"), (11 | 0x80, "crashed: SIGSEGV"), (1 << 8, "exit code 1"), (40, "killed by signal 40")],
)
def test_a_status_in_words(status: int, words: str) -> None:
    assert in_words(status) == words


def test_the_size_of_what_is_asked_is_in_the_number_of_the_question() -> None:
    """_IOWR(0xFF, 11, struct pidfd_info): 64 bytes in the first version of it."""
    assert process_ends._GET_INFO >> 16 & 0x3FFF == process_ends._INFO.size == 64
