"""Keep in a file what Ray itself prints into the driver's output, "(raylet) ..." and many lines after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from threading import current_thread
from typing import Any, TextIO, cast

from raytune_fsdp.base.durable import make_private, open_private
from raytune_fsdp.base.redaction import redact_text
from raytune_fsdp.base.untrusted import printable

RAYS_THREAD = "ray_listen_error_messages"
"""The thread of Ray's that prints. No setting keeps it from that."""
FILE = "ray.log"


@contextmanager
def apart_from_ray(logs: Path) -> Iterator[None]:
    """Write those lines to a file in `logs` while the context lasts; say so in one line."""
    with redirect_stdout(cast(TextIO, _Output(sys.stdout, logs / FILE))):
        yield


class _Output:
    """Standard output, except for one thread."""

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._said = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if current_thread().name != RAYS_THREAD:
            return self._stream.write(text)
        with suppress(OSError):
            make_private(self._path.parent)
            with open(self._path, "a", opener=open_private) as file:
                file.write(printable(redact_text(text), keep="\n\t"))
        if not self._said:
            self._said = True
            with suppress(OSError):
                self._stream.write(f"what Ray says of it is in {self._path}\n")
                self._stream.flush()
        return len(text)
