"""Try a stranger's tokenizer in another process before this one loads it.

What libraries build from a small file may take all memory or never end: normalizers that each write ten characters for
one, a post-processor that adds 200,000 tokens, patterns that backtrack over and over. Each content is tried once per
user and versions of the libraries; a success is noted in the user's own cache.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.base.untrusted import printable

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("tokenizer_child.py")
SECONDS = 60
"""Processor time of a trial. The largest tokenizer there is, of 262,000 tokens and 35 MB, takes 2."""
MEMORY = 1 << 30
"""Memory of a trial above what Python and the libraries take. The largest tokenizer takes 370 MB."""


def try_tokenizer(directory: Path, shown: Path, key: str) -> None:
    """Refuse a tokenizer that takes more time or memory than any does, or that fails as soon as it is used.

    `shown` is its directory in messages, `key` identifies its content. A tokenizer that cannot be loaded is left to the
    caller, who gets the same error in the same time.
    """
    known = _known()
    if known is not None and is_own(known / key):
        return
    try:
        libraries = [str(each) for each in sys.path]
        found = Trials.asked({"directory": str(directory), "seconds": SECONDS, "bytes": MEMORY, "path": libraries})
    except (OSError, ValueError) as error:
        logger.warning("%s: its tokenizer could not be tried in a process of its own: %s", shown, error)
        return
    if found["stage"] == "limits":
        raise ModelError(
            f"{shown} has a tokenizer that takes more than {SECONDS} s of processor time or {MEMORY >> 30} GB of "
            "memory, more than any does: download it again, or set model.tokenizer to another one"
        )
    if found["stage"] == "use":
        raise ModelError(
            f"{shown} has a tokenizer that cannot be used ({printable(str(found.get('error')))}): download it again, "
            "or set model.tokenizer to another one"
        )
    if known is not None and found["stage"] != "load":
        with suppress(OSError):
            (known / key).touch(mode=0o600)


def is_own(mark: Path) -> bool:
    """Return whether a file is there that this user has made: others may have been able to write to its directory."""
    try:
        facts = mark.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()


def _known() -> Path | None:
    """Return the directory with a file for each content that was tried; None if this user cannot have a private one."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        place = home / "raytune_fsdp" / "tokenizers"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (place, place.parent):
            facts = each.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                return None  # somebody else may have written it
            if facts.st_mode & 0o077:
                each.chmod(0o700)
    except (OSError, RuntimeError):  # no home, or one that is read-only
        return None
    return place


class Trials:
    """The process that tries tokenizers. It stays for further requests, which then need not wait for its imports."""

    _lock = Lock()
    _process: subprocess.Popen[str] | None = None

    @classmethod
    def asked(cls, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raise OSError or ValueError if there is none."""
        with cls._lock:
            if cls._process is None:
                return cls._ask(request)
            try:
                return cls._ask(request)
            except (OSError, ValueError):  # the process ended by itself, as nobody asked for a while
                cls.end()
                return cls._ask(request)

    @classmethod
    def _ask(cls, request: dict[str, Any]) -> dict[str, Any]:
        if cls._process is None:
            # -P: a file of the working directory is not a library. Threads take address space, which is limited.
            cls._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env={**os.environ, "RAYON_NUM_THREADS": "2"},
                start_new_session=True,
            )  # fmt: skip
            atexit.register(cls.end)
        process = cls._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        found = json.loads(process.stdout.readline())
        if not isinstance(found, dict) or "stage" not in found:
            raise ValueError("it gave no answer")
        return found

    @classmethod
    def end(cls) -> None:
        """End the process."""
        if cls._process is not None:
            process, cls._process = cls._process, None
            with suppress(OSError), process:
                process.kill()
