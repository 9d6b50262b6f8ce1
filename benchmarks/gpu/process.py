"""One piece of evidence in a process of its own: memory that runs out, a crash or a hang costs only that piece."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

DONE, CUT_OFF, FAILED, NOT_HERE, UNDER_WAY = "done", "cut off", "failed", "not here", "under way"

_EXIT_SECONDS = 10


class NotHereError(Exception):
    """This machine lacks what the piece needs."""


Keep = Callable[[Mapping[str, Any]], object]
"""Called with what a piece has measured so far, which stays if the piece is ended before it returns."""

Run = Callable[[str, Path, Keep], dict[str, Any]]
"""Called with `cuda` or `cpu`, an empty directory, and who keeps a part. What it returns becomes JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a machine must have for a piece. It is asked before anything is begun."""

    gib: float = 0
    """Memory of the device."""
    capability: tuple[int, int] = (0, 0)
    """Of the device, as CUDA counts it."""
    torch: str = ""
    """The oldest version."""
    packages: tuple[str, ...] = ()

    def lacking(self, machine: Mapping[str, Any]) -> str | None:
        """Return what is missing of a machine that `pieces.describe` describes; None: nothing, or nobody knows."""
        missing = [name for name in self.packages if name not in machine]
        if missing:
            return f"{' and '.join(missing)} is not installed"
        if self.torch and numbers_of(machine.get("torch", self.torch)) < numbers_of(self.torch):
            return f"needs torch {self.torch}, and this is {machine['torch']}"
        if self.gib > (room := machine.get("memory_gib", float("inf"))):
            return f"needs {self.gib:.0f} GiB, and the device has {room:.0f}"
        if self.capability > tuple(machine.get("capability", self.capability)):
            return f"needs a device of capability {self.capability[0]}.{self.capability[1]}"
        return None


NOTHING_SPECIAL = Needs()


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(each) for each in version.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One measurement. Picklable."""

    name: str
    kind: str
    """The table of the page that it is in."""
    seconds: float
    """It is stopped after these."""
    run: Run
    least: float = 0
    """Seconds with fewer of which it would find nothing, so that it is not begun."""
    usual: float = 0
    """Seconds that it takes, by a guess; 0: as its plan says."""
    needs: Needs = NOTHING_SPECIAL
    asked: Mapping[str, Any] | None = None
    """What it trains, for the plan that stands beside what is measured; None: it trains nothing that is planned."""


def run_alone(
    context: Any, piece: Piece, device: str, keep: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """Return how it ended, and its result or its error. `context` is one of multiprocessing's.

    `keep` is called with every part of the result as it comes.
    """
    ours, theirs = context.Pipe(duplex=False)
    kept: dict[str, Any] = {}
    deadline = time.monotonic() + piece.seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        process = context.Process(target=_run, args=(theirs, piece.run, device, directory))
        process.start()
        theirs.close()
        try:
            while ours.poll(max(0.0, deadline - time.monotonic())):
                found: dict[str, Any] = json.loads(ours.recv())
                if found["status"] != UNDER_WAY:
                    return {**kept, **found}
                kept = {"result": found["result"]}
                keep(found)
            cut = f"stopped after {piece.seconds:.0f} s, its limit"
            return {**_failed(cut), **({"status": CUT_OFF, **kept} if kept else {})}
        except EOFError:
            process.join(_EXIT_SECONDS)
            return {**_failed(f"its process died: {_ending(process.exitcode)}"), **kept}
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
        found = json.dumps({"status": DONE, "result": run(device, Path(directory), partial(_keep, pipe))})
    except NotHereError as lack:
        found = json.dumps({"status": NOT_HERE, "error": str(lack)})
    except BaseException as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        found = json.dumps(_failed(line, traceback.format_exc()))
    pipe.send(found)
    os._exit(0)  # neither threads nor destructors are waited for


def _keep(pipe: Any, part: Mapping[str, Any]) -> None:
    pipe.send(json.dumps({"status": UNDER_WAY, "result": part}))


def _end_with_parent() -> None:
    """A device whose memory a forgotten process holds is of no use to the next call."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
