"""Write what a rank's process prints to a file of the run, and to Ray's log of it, where the dashboard looks."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TextIO

from raytune_fsdp.base.durable import make_private, open_private
from raytune_fsdp.base.redaction import redact_text
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.base.untrusted import MIB

_COPY_SECONDS = 1.0


class RankLog:
    """Takes everything that is printed from here on, also by C libraries, and crashes."""

    def __init__(self, path: Path, *, in_ray: bool) -> None:
        """`in_ray`: copy it to where output has gone until now."""
        make_private(path.parent)
        sys.stdout.flush()
        sys.stderr.flush()
        self.in_ray = _now_at_1() if in_ray else None
        self._copy = _now_at_1() if in_ray else None
        file = open_private(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        faulthandler.enable(file=2)
        self._path = path
        self._at = path.stat().st_size
        self._rest = b""
        self._copying = Lock()
        if in_ray:
            in_thread(self._follow, "ray-log")

    def _follow(self) -> None:
        # Behind the file, not before it: a pipe that nobody empties would stop the rank.
        while True:
            time.sleep(_COPY_SECONDS)
            self.copy()

    def copy(self) -> None:
        """Copy what has been printed since, without secrets: whoever sees the dashboard may not see the run's files."""
        with self._copying, suppress(OSError, ValueError):  # a full disk of Ray's must not end the run
            if self._copy is None:
                return
            with open(self._path, "rb") as file:
                file.seek(self._at)
                while chunk := file.read(MIB):
                    self._at += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    self._copy.writelines(f"{redact_text(line.decode(errors='replace'))}\n" for line in lines)


def _now_at_1() -> TextIO:
    """Return a stream to where standard output goes now, which also works after that was sent elsewhere."""
    return os.fdopen(os.dup(1), "w", 1, errors="replace")
