"""One piece of evidence in a process of its own: memory that runs out, a crash or a hang costs only that piece."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

DONE, FAILED, NOT_HERE, UNDER_WAY = "done", "failed", "not here", "under way"

_EXIT_SECONDS = 10


class NotHereError(Exception):
    """This machine lacks what the piece needs."""


Run = Callable[[str, Path], dict[str, Any]]
"""Called with `cuda` or `cpu` and an empty directory. What it returns becomes JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One measurement. Picklable."""

    name: str
    kind: str
    """The table of the page that it is in."""
    seconds: float
    """It is stopped after these."""
    run: Run


def run_alone(context: Any, piece: Piece, device: str) -> dict[str, Any]:
    """How it ended, and its result or its error. `context` is one of multiprocessing's."""
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        process = context.Process(target=_run, args=(theirs, piece.run, device, directory))
        process.start()
        theirs.close()
        try:
            if not ours.poll(piece.seconds):
                return _failed(f"stopped after {piece.seconds:g} s, its limit")
            found: dict[str, Any] = json.loads(ours.recv())
            return found
        except EOFError:
            process.join(_EXIT_SECONDS)
            return _failed(f"its process died: {_ending(process.exitcode)}")
        finally:
            _end(process)
            ours.close()


def _failed(error: str, trace: str = "") -> dict[str, Any]:
    return {"status": FAILED, "error": error, "traceback": trace}


def _ending(code: int | None) -> str:
    if code is None:
        return "its pipe is closed, and it hangs"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _end(process: Any) -> None:
    """The process, and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _run(pipe: Any, run: Run, device: str, directory: str) -> None:
    os.setpgid(0, 0)
    mp.set_start_method(None, force=True)  # as in a process that nobody has forked from a server
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found = json.dumps({"status": DONE, "result": run(device, Path(directory))})
    except NotHereError as lack:
        found = json.dumps({"status": NOT_HERE, "error": str(lack)})
    except BaseException as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        found = json.dumps(_failed(line, traceback.format_exc()))
    pipe.send(found)
    os._exit(0)  # neither threads nor destructors are waited for


def _end_with_parent() -> None:
    """A device whose memory a forgotten process holds is of no use to the next call."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
