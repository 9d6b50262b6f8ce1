"""Where chat templates run: a process with limits for each process that reads rows (`template_program.py`).

What meets a limit ends the run and is never left out of the data: how fast a machine is may not decide which rows
exist.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from raytune_fsdp.base.errors import TransientError
from raytune_fsdp.data.rows import template_program
from raytune_fsdp.data.rows.template_program import NO_MEMORY, read_count, read_exactly, send

SECONDS = 10.0
"""Processor time of a request. A conversation of eight turns takes a template about 60 us."""
MEMORY, MEMORY_PER_BYTE = 512 << 20, 32
"""Memory of a request, above what Python takes: a long row may take more."""

_DEEP = "it goes too deep"

_SETTINGS = {"PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": "0", "TZ": "UTC"}
"""Settings of Python that decide what a template writes. Without the first, each process would order a set
(`a.keys() - b.keys()`) in its own way; without the second, some machines would leave out a row with a long number;
without the third, `strftime_now("%s")` would depend on where a machine is."""


class LimitError(Exception):
    """A template takes more than any template may; the message says of what."""


class TimeLimitError(LimitError):
    """It takes more time, which another machine might not."""


class Sandbox:
    """The process that renders. It begins with the first request, and ends with this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._fork)
        atexit.register(self.end)

    def _fork(self) -> None:
        # Another thread may be in the middle of a request: closing its pipe here would write the rest into it.
        self._parents = (self._process, getattr(self, "_parents", None))
        self._lock, self._process = Lock(), None

    def ask_all(
        self, source: str, variables: Sequence[Mapping[str, Any]] | None, *, date: str = ""
    ) -> list[tuple[str, Any]]:
        """Return how each of several renderings has ended, and with what; without variables, what there is to know.

        Together they have the limits of one. `date`: what the template gets as today's date. Raises LimitError.
        """
        request = pickle.dumps((source, variables, date))
        limits: dict[int | None, str] = {
            -signal.SIGPROF: f"it takes more than {SECONDS:g} s of processor time",
            -signal.SIGSEGV: _DEEP,
            NO_MEMORY: f"it takes more than {MEMORY + MEMORY_PER_BYTE * len(request) >> 20} MiB of memory",
        }
        with self._lock:
            for again in (True, False):
                try:
                    answers = self._answer(request)
                    break
                except (OSError, EOFError) as error:
                    code = self.end(seconds=1.0)  # it closes its pipes before it ends
                    if code in limits:
                        kind = TimeLimitError if code == -signal.SIGPROF else LimitError
                        raise kind(limits[code]) from None
                    if not again:
                        why = error if code is None else f"it ended with code {code}"
                        raise TransientError(f"the process of the chat templates: {why}") from error
                except BaseException:  # the next request would get the answer to this one
                    self.end()
                    raise
        if any(kind == "deep" for kind, _ in answers):
            raise LimitError(_DEEP)
        return answers

    def _answer(self, request: bytes) -> list[tuple[str, Any]]:
        if self._process is None:
            # -P: a file of the working directory is not Jinja. A session of its own: Ctrl-C is for this process.
            path = os.pathsep.join(each for each in sys.path if each and isinstance(each, str))
            self._process = subprocess.Popen(
                [sys.executable, "-P", template_program.__file__, *map(str, (MEMORY, MEMORY_PER_BYTE, SECONDS))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                env={**os.environ, **_SETTINGS, "PYTHONPATH": path},
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        send(process.stdin, request)
        answer = read_exactly(process.stdout, read_count(process.stdout))
        return [(kind, value) for kind, value in json.loads(answer.decode("utf-8", "surrogatepass"))]

    def end(self, seconds: float = 0.0) -> int | None:
        """End the process, after it had these seconds to end by itself, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with suppress(OSError), process:  # what was not written yet is not read any more
            process.kill()
        return process.wait()


SANDBOX = Sandbox()
