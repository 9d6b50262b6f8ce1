"""A process that trains runs, one after another, for a program that may be killed at any moment.

    python -m raytune_fsdp.tune.ray_tune.driven ANSWERS

Orders are lines of JSON on its standard input, answers on the open file ANSWERS. It trains with `finetune`, in its main
thread, so signals are its own; a run that ends in order keeps what it has imported for the next one. It is no child of
the program that started it: Ray kills the children of a worker that it kills, and this one is to commit a checkpoint
first. It learns of the end of that program from the end of its input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import psutil

from raytune_fsdp.base.durable import open_private
from raytune_fsdp.base.errors import ConfigError, Interrupted, RaytuneError, TrainingError, UserError, in_one_line
from raytune_fsdp.base.leaving import crashing, leave
from raytune_fsdp.base.redaction import redact_shapes

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.launch.callbacks import StopHandle

STOP_SECONDS = 30.0
"""How long a run that is asked to stop may take for a last checkpoint, unless `RAYTUNE_FSDP_STOP_SECONDS` says so
(launch/notices.py). After that it is asked to end at once: it goes on from an older checkpoint."""
_AT_ONCE_SECONDS = 8.0
"""How long the end at once may take before this process is killed, and its ranks with it."""
_BEGINS_SECONDS = 60.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run has ended."""

    how: Literal["finished", "stopped", "refused", "failed", "gone"]
    """`refused`: by an error of the user's; `gone`: its process has died."""
    problem: str = ""

    def error(self) -> RaytuneError:
        """Return what to raise about a run that should have gone on."""
        if self.how == "stopped":
            return Interrupted(self.problem)
        return ConfigError(self.problem) if self.how == "refused" else TrainingError(self.problem)


class RunDriver:
    """The program's side: starts the process, gives it orders, and looks at what has become of them."""

    def __init__(self, *, cwd: Path, env: Mapping[str, str], log: Path) -> None:
        """`log`: where the process prints until it gets an order."""
        self._log = log
        self._rest = b""
        self._ending = False
        """Whether the process has said that it ends, too."""
        self._end: RunEnd | None = RunEnd("finished")
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        try:
            _start(orders, answers, cwd=cwd, env=env, log=log)
            os.set_blocking(self._answers, False)
            self._process = self._hello()
        except BaseException:
            self.close()  # at the end of its orders the process ends, if it has begun
            raise

    def _hello(self) -> psutil.Process:
        there, _, _ = select.select([self._answers], [], [], _BEGINS_SECONDS)
        for answer in self._read():  # none where it has died before its first word, which ends the pipe
            with suppress(psutil.NoSuchProcess):
                return psutil.Process(int(answer["pid"]))
        how = "ended at once" if there else f"did not start in {_BEGINS_SECONDS:g} s"
        raise TrainingError(f"the process for the run {how} (see {self._log})")

    def train(self, config: FinetuneConfig, log: Path, *, stop_seconds: float = STOP_SECONDS) -> None:
        """Train this run to its end. Returns at once. `log`: where the process prints from now on."""
        assert self._end is not None, "one run at a time"
        self._log, self._end = log, None
        sections = config.model_dump(mode="json", exclude_unset=True)
        self._write({"train": sections, "log": str(log), "stop": stop_seconds})

    def look(self) -> RunEnd | None:
        """Return how the run has ended; None if it trains."""
        if self._end is None:
            there = self.alive  # before the last answer is read
            for answer in self._read():
                self._end, self._ending = RunEnd(answer["how"], answer["problem"]), answer["ending"]
            if self._end is None and not there:
                self._end = RunEnd(
                    "gone",
                    f"the process {self._process.pid}, which drove the run, has ended without a word; what it printed "
                    f"is in {self._log}",
                )
        return self._end

    @property
    def alive(self) -> bool:
        """Whether the process can take orders."""
        with suppress(psutil.NoSuchProcess):
            there = self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
            return there and not self._ending
        return False

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ask the run to commit a checkpoint and end, within these seconds, and wait until it has ended."""
        if self.look() is not None:
            return
        self._write({"stop": seconds})
        until, killed = time.monotonic() + seconds + 2 * _AT_ONCE_SECONDS, False
        while self.look() is None:
            if killed and time.monotonic() > until:  # the kernel waits for storage that does not answer
                self._end, self._ending = RunEnd("gone", f"process {self._process.pid} was killed, and is there"), True
            elif time.monotonic() > until:  # not even its threads do anything any more
                with suppress(psutil.NoSuchProcess):
                    self._process.kill()
                until, killed = time.monotonic() + _AT_ONCE_SECONDS, True
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Let the process end, and a run that it still trains before it. Does not wait."""
        os.close(self._orders)
        os.close(self._answers)

    def _write(self, order: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # it has died, which the next look finds
            left = json.dumps(order).encode() + b"\n"
            while left:
                left = left[os.write(self._orders, left) :]

    def _read(self) -> list[dict[str, Any]]:
        with suppress(BlockingIOError):
            while part := os.read(self._answers, 1 << 16):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


def _start(orders: int, answers: int, *, cwd: Path, env: Mapping[str, str], log: Path) -> None:
    """Start the process, with its ends of the pipes, which are closed here."""
    try:
        with open(log, "ab", opener=open_private) as output:
            # -P: a file of the working directory is no module of ours. The user's are found there (`own_code`).
            subprocess.run(
                [sys.executable, "-P", "-m", __name__, str(answers)], check=True, start_new_session=True, stdin=orders,
                stdout=output, stderr=output, pass_fds=[answers], cwd=cwd, env=dict(env), timeout=_BEGINS_SECONDS,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise TrainingError(f"a process for the run could not be started ({in_one_line(error)}; see {log})") from error
    finally:
        os.close(orders)
        os.close(answers)


class _Order:
    """A run that is to be trained."""

    def __init__(self, given: dict[str, Any], handle: StopHandle) -> None:
        self.sections, self.log, self.seconds = given["train"], given["log"], float(given["stop"])
        self.handle = handle
        self.over = threading.Event()

    def stop(self, seconds: float) -> None:
        """Let the run end: with a checkpoint, then without another one, then by force."""
        if self.over.is_set() or self.handle.asked.is_set():
            return
        self.handle.stop()  # besides the signal, which finds nobody who heeds it before `finetune` begins

        def insist() -> None:
            for kind, wait in (
                (signal.SIGTERM, seconds), (signal.SIGTERM, _AT_ONCE_SECONDS), (signal.SIGKILL, 0.0)
            ):  # fmt: skip
                os.kill(os.getpid(), kind)
                if self.over.wait(wait):
                    return

        threading.Thread(target=insist, name="insist", daemon=True).start()


class _Driven:
    """The side of the process."""

    def __init__(self, orders: int, answers: int) -> None:
        self._answers = answers
        self._waiting: SimpleQueue[_Order | None] = SimpleQueue()
        for kind in (signal.SIGTERM, signal.SIGINT):  # between two runs, one that came too late for the last
            signal.signal(kind, lambda *_: None)
        self._tell({"pid": os.getpid()})
        threading.Thread(target=self._listen, args=(orders,), name="orders", daemon=True).start()

    def _listen(self, orders: int) -> None:
        from raytune_fsdp.launch.callbacks import StopHandle

        order: _Order | None = None
        with os.fdopen(orders, "rb") as lines:
            for line in lines:
                given = json.loads(line)
                if "train" in given:
                    order = _Order(given, StopHandle())
                    self._waiting.put(order)
                elif order is not None:
                    order.stop(float(given["stop"]))
        self._waiting.put(None)
        if order is not None:
            order.stop(order.seconds)

    def serve(self) -> int:
        while (order := self._waiting.get()) is not None:
            end = self._train(order)
            order.over.set()
            ending = end.how not in ("finished", "stopped") or bool(crashing)
            self._tell({"how": end.how, "problem": end.problem, "ending": ending})
            if ending:
                return 1  # what is left of it in this process must not be the next run's
        return 0

    def _train(self, order: _Order) -> RunEnd:
        _print_to(order.log)
        if order.handle.asked.is_set():
            return RunEnd("stopped", "stopped before it began; nothing is lost")
        try:
            from raytune_fsdp.launch.finetune import finetune

            finetune(order.sections, stop=order.handle)
        except BaseException as error:  # also what is no Exception: nobody else would hear of it
            if not isinstance(error, RaytuneError):
                traceback.print_exc()
            problem = redact_shapes(str(error) if isinstance(error, RaytuneError) else in_one_line(error))
            print(f"error: {problem}", file=sys.stderr, flush=True)
            if isinstance(error, Interrupted):
                return RunEnd("stopped", problem)
            return RunEnd("refused" if isinstance(error, UserError) else "failed", problem)
        return RunEnd("finished")

    def _tell(self, answer: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):
            os.write(self._answers, json.dumps(answer).encode() + b"\n")


def _print_to(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log, "ab", buffering=0, opener=open_private) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def main() -> None:
    answers = int(sys.argv[1])
    if os.fork():  # in a session of its own already: this makes it nobody's child
        os._exit(0)
    os.set_inheritable(answers, False)
    orders = os.dup(0)
    with open(os.devnull) as nothing:  # what this process starts must not read its orders
        os.dup2(nothing.fileno(), 0)
    leave(_Driven(orders, answers).serve())


if __name__ == "__main__":
    main()
