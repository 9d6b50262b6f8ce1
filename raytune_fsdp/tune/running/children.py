"""The processes of trials: each is the command that a person would give, and ends when the sweep's command is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from raytune_fsdp.base.untrusted import UnsoundError, open_regular, printable
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.text import dump
from raytune_fsdp.launch.environment import with_package
from raytune_fsdp.record.screen_messages import VARIABLE
from raytune_fsdp.tune.log import open_own

_TIED = Path(__file__).with_name("tied.py")
_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)
_MOST_CHARS = 2000


class Child:
    """A process that trains a trial's run."""

    def __init__(
        self, config: FinetuneConfig, output: Path, variables: Mapping[str, str], flags: Sequence[str]
    ) -> None:
        """Start it. What it prints is added to the file `output`. `variables`: further ones of its environment."""
        self._output = output
        self.asked = False
        """Whether it was asked to stop."""
        command = [sys.executable, "-P", "-m", "raytune_fsdp.cli.main", "train", *flags, "--config", "/dev/stdin"]
        inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
        # The config by a file without a name: it may hold secrets, which belong into no file of the sweep.
        with (
            tempfile.TemporaryFile() as given,
            open(output, "ab", opener=open_own) as said,
        ):
            given.write(dump(config.model_dump(exclude_unset=True)).encode())
            given.seek(0)
            self._begins = said.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), *command],
                stdin=given, stdout=said, stderr=subprocess.STDOUT,
                env={**with_package(inherited), **variables},
                start_new_session=True,  # Ctrl-C is for the sweep's command, which passes it on
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def code(self) -> int | None:
        """Return its exit code; negative: the signal that has ended it; None: it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to commit a checkpoint and end; asked again, to end at once."""
        self.asked = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def error(self) -> str:
        """Return in one line why it has failed, as it has said itself."""
        if (code := self.code()) is not None and code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        said = self._tail()
        found = _ERROR.findall(said)
        lines = found or said.strip().splitlines()[-1:] or [f"it ended with {code}"]
        return printable("; ".join(line.strip() for line in lines))[:_MOST_CHARS]

    def _tail(self) -> str:
        """Return the end of what it has printed."""
        try:
            with os.fdopen(open_regular(self._output), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._begins, size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace")
        except (OSError, UnsoundError):
            return ""
