"""Progress on stderr, and what becomes of lines on stdout meanwhile."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PROGRAM = """
import sys
from raytune_fsdp.cli.progress import show_progress
with show_progress() as progress:
    progress("counting", 1, 2)
    print("step 1", flush=True)
    sys.stdin.readline()
    progress("counting", 2, 2)
    print("step 2", flush=True)
"""
SECONDS = 30


@contextmanager
def running(stdout: int | IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program with a terminal as stderr, and that terminal."""
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=stdout, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "CI": ""},
    )  # fmt: skip
    os.close(theirs)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def drain(terminal: int) -> bytes:
    """What a terminal shows until the program ends."""
    shown = b""
    try:
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    except OSError:  # Linux says that a terminal has ended by an I/O error
        pass
    return shown


def test_lines_reach_a_pipe_while_it_runs() -> None:
    with running(subprocess.PIPE) as (process, terminal):
        assert process.stdout is not None and process.stdin is not None
        assert select.select([process.stdout], [], [], SECONDS)[0], "nothing came before the end"
        assert process.stdout.readline() == b"step 1\n"
        process.stdin.write(b"\n")
        process.stdin.close()
        shown = drain(terminal)
        assert process.stdout.read() == b"step 2\n" and b"step" not in shown


def test_lines_reach_a_file_without_the_bar(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log, running(log) as (process, terminal):
        assert process.stdin is not None
        shown = b""
        while b"counting" not in shown:
            assert select.select([terminal], [], [], SECONDS)[0], shown
            shown += os.read(terminal, 1 << 16)
        process.stdin.write(b"\n")
        process.stdin.close()
        shown += drain(terminal)
        assert process.wait(SECONDS) == 0
    assert path.read_bytes() == b"step 1\nstep 2\n"
    assert b"counting" in shown and b"step" not in shown
