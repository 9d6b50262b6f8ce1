"""A terminal for tests: what a program shows on it, line by line, and a real process that has one."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Terminal:
    """As much of one as our programs use; anything else fails the test."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self._grid = [[" "] * columns for _ in range(rows)]
        self._row, self._column = 0, 0
        self._gone: list[str] = []
        """What has scrolled out at the top."""
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.clears = 0
        """How often the screen below the cursor was erased."""

    def feed(self, data: bytes) -> None:
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        place = 0
        while place < len(text):
            if text[place] == "\x1b":
                found = _CONTROL.match(text, place)
                if found is None:
                    self._rest = text[place:]
                    assert len(self._rest) < 20, f"unknown control {self._rest[:20]!r}"
                    return
                self._control(found[1], found[2], found[3])
                place = found.end()
            else:
                self._put(text[place])
                place += 1

    def _control(self, private: str, numbers: str, kind: str) -> None:
        count = int(numbers or 0) if numbers.isdigit() or not numbers else 0
        match private + kind:
            case "m":
                pass
            case "A":
                self._row = max(0, self._row - max(1, count))
            case "B":
                self._row = min(self.rows - 1, self._row + max(1, count))
            case "K":
                self._grid[self._row][self._column :] = [" "] * (self.columns - self._column)
            case "J":
                self.clears += 1
                self._grid[self._row][self._column :] = [" "] * (self.columns - self._column)
                for row in range(self._row + 1, self.rows):
                    self._grid[row] = [" "] * self.columns
            case unknown:
                raise AssertionError(f"unknown control {unknown!r}: a terminal would be left in another state")

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._new_line()
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\t":
            self._column = min(self.columns - 1, self._column // 8 * 8 + 8)
        elif character != "\a":
            assert character.isprintable(), f"unknown character {character!r}"
            if self._column == self.columns:
                self._column = 0
                self._new_line()
            self._grid[self._row][self._column] = character
            self._column += 1

    def _new_line(self) -> None:
        if self._row == self.rows - 1:
            self._gone.append("".join(self._grid.pop(0)).rstrip())
            self._grid.append([" "] * self.columns)
        else:
            self._row += 1

    @property
    def shown(self) -> list[str]:
        """The lines on the screen up to the last one that has text."""
        return "\n".join("".join(row).rstrip() for row in self._grid).rstrip("\n").split("\n")

    @property
    def lines(self) -> list[str]:
        """All lines since the beginning."""
        return [*self._gone, *self.shown]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def cursor(self) -> tuple[int, int]:
        return len(self._gone) + self._row, self._column


class Session:
    """A process on a terminal of its own, and what that shows."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, screen: Terminal) -> None:
        self.process, self.terminal, self.screen = process, master, screen
        self.frames: list[list[str]] = []
        """What is shown after each piece that arrived."""
        self.arrived: list[tuple[float, bytes]] = []

    def read(self, seconds: float) -> bool:
        """Take what arrives within this time; False if the terminal is closed."""
        if not select.select([self.terminal], [], [], seconds)[0]:
            return True
        piece = b""
        while not piece or select.select([self.terminal], [], [], 0.01)[0]:  # a write may arrive in pieces
            try:
                piece += os.read(self.terminal, 1 << 16)
            except OSError:  # Linux says that a terminal has ended by an I/O error
                break
        if not piece:
            return False
        self.arrived.append((time.monotonic(), piece))
        self.screen.feed(piece)
        self.frames.append(self.screen.shown)
        return True

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.screen.text}"
            assert self.read(0.1), f"the process has ended:\n{self.screen.text}"

    def shows(self, text: str, seconds: float = 60) -> None:
        self.until(lambda: text in "\n".join(self.screen.shown), seconds)

    def press(self, keys: bytes) -> None:
        os.write(self.terminal, keys)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def end(self, seconds: float = 60) -> int:
        """Wait for the end of the process; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on after {seconds} s:\n{self.screen.text}"
            self.read(0.1)
        while select.select([self.terminal], [], [], 0.2)[0] and self.read(0):
            pass
        return self.process.returncode


@contextmanager
def on_terminal(
    command: Sequence[str], columns: int = 80, rows: int = 24, cwd: Path | None = None, **environment: str | None
) -> Iterator[Session]:
    """Run a command as a shell does: on a terminal that sends it Ctrl-C, and that outlives it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    unwanted = ("CI", "NO_COLOR", "COLUMNS", "LINES")
    known = {key: value for key, value in os.environ.items() if key not in unwanted}
    wanted = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
    process = subprocess.Popen(
        ["sh", "-c", 'trap : INT; "$@"; code=$?; sleep 0.3; exit $code', "sh", *command],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=cwd,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**known, **{key: value for key, value in wanted.items() if value is not None}},
    )  # fmt: skip
    os.close(slave)
    try:
        yield Session(process, master, Terminal(columns, rows))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(master)
