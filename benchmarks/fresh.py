"""A command as a user gives it: a fresh process that starts its own Ray, or joins one. Nothing of it is left."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil

Found = TypeVar("Found")

REPOSITORY = Path(__file__).resolve().parent.parent
_LOOK_SECONDS, _SAMPLE_SECONDS = 0.02, 0.2
_END_SECONDS = 60
_PR_SET_CHILD_SUBREAPER = 36


def environment(temporary: Path) -> dict[str, str]:
    """The same for both sides: they join no Ray that runs already, and send nothing to anyone."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        # Ordinary users keep the bytecode of what they import, and leave the tokenizer its threads.
        if not name.startswith("RAY_") and name not in ("PYTHONDONTWRITEBYTECODE", "TOKENIZERS_PARALLELISM")
    }
    return {**inherited, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(temporary)}


def warm_up() -> None:
    """Bring what both sides import into the file cache, and compile our bytecode, as an installation does."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", "raytune_fsdp"], cwd=REPOSITORY, check=True)
    subprocess.run(
        [sys.executable, "-c", "import ray.data, ray.train.torch, torch, transformers.models.llama.modeling_llama"],
        cwd=REPOSITORY, check=True,
    )  # fmt: skip


def adopt() -> set[psutil.Process]:
    """Make this process the parent of what loses its own below it, as a process does that is to outlive those that have
    started it: else it would be nobody's. Returns the children that there are now."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return set(psutil.Process().children())


class ProcessorTime(threading.Thread):
    """Of some processes and of all below them, also of those that have ended, but for what they took after the last
    sample: Ray's raylet ignores the end of its workers, so no parent's own figure has them."""

    def __init__(self, *pids: int) -> None:
        super().__init__(daemon=True)
        self._roots = [psutil.Process(pid) for pid in pids]
        self._others = adopt()
        self._taken: dict[psutil.Process, float] = {}
        self._ended, self._lock = threading.Event(), threading.Lock()

    def follow(self, pid: int) -> None:
        """This one, too, from now on."""
        with self._lock:
            self._roots.append(psutil.Process(pid))

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self.seconds()

    def seconds(self) -> float:
        with self._lock:
            for root in {*self._roots, *(set(psutil.Process().children()) - self._others)}:
                with suppress(psutil.Error):
                    for process in [root, *root.children(recursive=True)]:
                        with suppress(psutil.Error):
                            times = process.cpu_times()
                            self._taken[process] = times.user + times.system
            return sum(self._taken.values())

    def end(self) -> None:
        self._ended.set()
        self.join()


class Command:
    """Runs from `with` to `with`'s end; what it prints goes to a file."""

    def __init__(
        self, arguments: list[str], log: Path, env: dict[str, str], processor: ProcessorTime | None = None
    ) -> None:
        """`processor`: counts others, too, and goes on after this command."""
        self._arguments, self._log, self._env = arguments, log, env
        self._counted = processor
        self.name = log.stem

    def __enter__(self) -> Command:
        self.processor, self._others = self._counted or ProcessorTime(), adopt()
        with self._log.open("wb") as log:
            self.started = time.time()
            self._process = psutil.Popen(
                [sys.executable, *self._arguments], cwd=REPOSITORY, env=self._env, stdout=log, stderr=subprocess.STDOUT
            )
        self.processor.follow(self._process.pid)
        if self._counted is None:
            self.processor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._counted is None:
            self.processor.end()
        ours = self._descendants()
        if self._process.is_running():
            self._process.terminate()
            psutil.wait_procs([self._process], timeout=_END_SECONDS)
        for process in [self._process, *ours]:
            if process.is_running():
                process.kill()
        psutil.wait_procs(ours, timeout=_END_SECONDS)

    def kill(self) -> None:
        """This process alone, without a word to it."""
        self._process.kill()
        self._process.wait()

    def _descendants(self) -> list[psutil.Process]:
        """All below it, and what has left it for this process."""
        left = set(psutil.Process().children()) - self._others - {self._process}
        return [*self._process.children(recursive=True), *left] if self._process.is_running() else list(left)

    def wait_for(self, look: Callable[[], Found | None], what: str, seconds: float = 240) -> tuple[Found, float]:
        """What `look` finds at last, and when."""
        deadline = time.time() + seconds
        while (found := look()) is None:
            if self._process.poll() is not None or time.time() > deadline:
                raise RuntimeError(f"{self.name}: no {what}; it printed:\n{self._tail()}")
            time.sleep(_LOOK_SECONDS)
        return found, time.time()

    def finish(self, seconds: float = 240) -> float:
        """Wait for its end, which must be a good one. Returns the seconds since its start."""
        try:
            code = self._process.wait(seconds)
        except psutil.TimeoutExpired:
            code = None
        if code != 0:
            raise RuntimeError(f"{self.name}: ended with {code}; it printed:\n{self._tail()}")
        return time.time() - self.started

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON Lines file that may not be there yet."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


class Lines:
    """Those of a JSON Lines file that grows: it is looked at often, so each line is read once. A file that is cut is
    read anew."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._lines = path, 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._read:
                self._read, self._lines = 0, []
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    self._lines.append(json.loads(line))
        return self._lines
