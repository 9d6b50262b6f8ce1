"""Show all output of a command above a region with its progress, by a small process that alone writes to the terminal.

The output of the command and of the processes that it starts goes into a pipe. At the pipe's other end this process
prints the lines, and below them the region (region.py). So a line of any library, of a rank or of a crash never breaks
the region, and training never waits for a terminal.

Ctrl-C removes the region for good: the next Ctrl-C may end the command at once, and the shell would print its prompt
before this process could remove the region. For the same reason nothing is removed when the command was killed.
"""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Literal

from raytune_fsdp.base.leaving import flush_output
from raytune_fsdp.cli.region import Region, View, broken, clean
from raytune_fsdp.launch.environment import environment, with_package
from raytune_fsdp.record.screen_messages import VARIABLE, read_message

_DRAW_SECONDS = 0.1
_TICK_SECONDS = 1.0
_END = "\x1e\x1eend"
"""The last line. The pipe may stay open for longer, if processes that outlive the command have it."""
_MOST_LINES = 10_000
"""The most lines that wait for a terminal whose output was stopped (Ctrl-S); older ones are dropped."""
_MOST_OF_LINE = 1 << 16
"""The most characters that are kept of a line that has not ended."""
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT}
"""Signals that a terminal or a scheduler sends to all processes of a command. This process blocks them: it ends when
the command does."""


@contextmanager
def screen(files: Sequence[int], *, colours: bool) -> Iterator[bool]:
    """Show what this process and its children write to these files above a region, while the context lasts.

    The files are all one terminal. The region shows messages (record/screen_messages.py). Yields False if there is no
    region, because the process could not be started.
    """
    kept = {file: os.dup(file) for file in files}
    try:
        process = _start(kept[files[0]])
    except OSError:
        process = None
    if process is None or process.stdin is None:
        yield False
        return
    flush_output()
    for file in files:
        os.dup2(process.stdin.fileno(), file)
    try:
        with environment({VARIABLE: "colours" if colours else "plain"} if 1 in files else {}):
            yield True
    finally:
        flush_output()
        for file, terminal in kept.items():
            os.dup2(terminal, file)
            os.close(terminal)
        with suppress(OSError):
            process.stdin.write(f"{_END}\n".encode())
            process.stdin.close()
        try:
            process.wait()  # until the region is gone: what is printed next stands in its place
        except BaseException:  # Ctrl-C at this moment
            process.wait()
            raise


def _start(terminal: int) -> subprocess.Popen[bytes]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the process inherits the mask
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "raytune_fsdp.cli.screen"],
            stdin=subprocess.PIPE, stdout=terminal, stderr=subprocess.DEVNULL,
            env=with_package(os.environ),
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Screen:
    """The work of that process: it reads its input and writes to the terminal."""

    def __init__(self, source: int, terminal: int) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        self._source, self._terminal, self._encoding = source, terminal, encoding
        self._writer = _Writer(terminal)
        self._region, self._view = Region(), View(blocks=_can_show("█░", encoding))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._above: list[str] = []
        self._hidden = False
        self._ended: Literal["", "done", "killed"] = ""

    def run(self) -> None:
        drawn, dirty, parent = 0.0, False, os.getppid()
        interrupted = _wake_at_interrupts()
        while not self._ended:
            wait = max(0.0, drawn + _DRAW_SECONDS - time.monotonic()) if dirty else _TICK_SECONDS
            ready = select.select([self._source, interrupted], [], [], wait)[0]
            if interrupted in ready:
                os.read(interrupted, 1)
                self._hide()
            if self._source in ready:
                self._read()
                dirty = True
            elif os.getppid() != parent:  # the command was killed, and a process that it started still has the pipe
                self._ended = "killed"
            elif self._view.ticks:
                dirty = True
            if dirty and time.monotonic() - drawn >= _DRAW_SECONDS and not self._writer.busy:
                self._draw()
                drawn, dirty = time.monotonic(), False
        self._above += [clean(self._rest)] if self._rest else []
        if select.select([interrupted], [], [], 0)[0]:  # Ctrl-C ended the command before it was noticed here
            self._hide()
        if self._ended == "killed":
            self._write("".join(f"\r\n{line}" for line in self._above))
        else:
            self._hidden = True
            self._draw()
        self._writer.finish()

    def _hide(self) -> None:
        if not self._hidden:
            self._above.insert(0, "^C")
            self._hidden = True
            self._draw()

    def _read(self) -> None:
        found = os.read(self._source, 1 << 16)
        *lines, rest = (self._rest + self._decoder.decode(found, not found)).split("\n")
        # Keep the last text of a line that is rewritten again and again, and the end of an endless one.
        self._rest = rest[rest.rfind("\r", 0, -1) + 1 :][-_MOST_OF_LINE:]
        for line in lines:
            if line.endswith(_END):
                self._rest, self._ended = line.removesuffix(_END), "done"
                return
            if (fields := read_message(line)) is not None:
                self._view.take(fields)
            else:
                self._above.append(clean(line))
        del self._above[:-_MOST_LINES]
        if not found:
            self._ended = "killed"

    def _draw(self) -> None:
        try:
            columns, rows = os.get_terminal_size(self._terminal)
        except OSError:
            columns, rows = 80, 24
        columns, rows = columns or 80, rows or 24
        lines = [] if self._hidden else self._view.lines(columns, rows)
        above, self._above = self._above, []
        above = [part for line in above for part in broken(line, columns)]
        self._write(self._region.draw(above, lines, columns))

    def _write(self, text: str) -> None:
        self._writer.write(text.encode(self._encoding, "replace"))


class _Writer:
    """Writes to the terminal in a thread.

    A terminal that takes nothing (Ctrl-S, a sleeping laptop at the other end) must not keep whoever prints waiting. To
    ask whether it is ready would not help: it may take less than there is to write.
    """

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._given, self._taken = 0, 0
        """Pieces given to the thread, and taken by the terminal; each number is written by one thread only."""
        self._failed: OSError | None = None
        self._thread = Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether the terminal has not taken everything yet. Raises OSError if it is gone."""
        if self._failed is not None:
            raise self._failed
        return self._taken < self._given

    def write(self, data: bytes) -> None:
        self._given += 1
        self._queue.put(data)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                while data:  # the terminal may take less than all
                    data = data[os.write(self._terminal, data) :]
            except OSError as error:
                self._failed = error
                return
            self._taken += 1


def _wake_at_interrupts() -> int:
    """Make Ctrl-C do nothing here, except that the returned file becomes readable."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since before this process began
    return ours


def _can_show(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def main() -> None:
    with suppress(OSError):  # the terminal is gone: end, and let the command's lines go nowhere
        _Screen(sys.stdin.fileno(), sys.stdout.fileno()).run()


if __name__ == "__main__":
    main()
