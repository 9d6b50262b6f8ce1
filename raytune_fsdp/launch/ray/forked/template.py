"""The process that others are forked from.

    python -m raytune_fsdp.launch.ray.forked.template DIRECTORY PACKAGE THREADS

It imports what a rank needs but Ray, whose C++ reads the environment when it is imported, and serves a socket in its
directory. For each job on a node (for their variables RAY_...) it forks a second template, which imports Ray and forks
the workers. Neither of them connects to Ray, draws a random number or touches a GPU, so that a fork is what a new
process would be after the same imports. In any doubt a request is refused: another environment, code that was written
after it was imported, another Ray, other control groups. The process that has asked then starts Python.

It outlives a driver that is killed, and serves the next command of the run, which asks within seconds. It ends when a
driver says so, or once nobody has wanted it for a minute.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shlex
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from raytune_fsdp.launch.importing import importing
from raytune_fsdp.launch.ray.forked import ask
from raytune_fsdp.launch.ray.forked.messages import receive, send, user_of
from raytune_fsdp.launch.ray.forked.process import (
    LAUNCHER,
    OMP,
    SOCKET,
    Wanted,
    difference,
    of_job,
    of_process,
    run,
    worker_of_ray,
)

_LOCK = "lock"
LINGER_SECONDS = 60.0
"""How long it stays without a driver and without a worker."""
_TICK_SECONDS = 2.0
_READ_SECONDS = 5.0
WITHOUT_RAY = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers", "raytune_fsdp.launch.worker",
)  # fmt: skip
WITH_RAY = (
    "ray.train.torch", "ray.data", "ray.train.v2._internal.execution.controller.controller",
    "ray.train.v2._internal.execution.worker_group.worker_group", "raytune_fsdp.launch.ray.failures",
    "raytune_fsdp.launch.ray.rank", "raytune_fsdp.launch.ray.tasks.batches", "raytune_fsdp.launch.ray.tasks.stream",
    "raytune_fsdp.launch.ray.nodes.node_watch", "raytune_fsdp.launch.ray.board",
)  # fmt: skip
"""What Ray Train's controller, ranks, and the actors beside them import."""


@dataclass(slots=True)
class Begun:
    """A process that was forked, and the connection that was opened to ask for it."""

    pid: int
    connection: socket.socket
    gate: socket.socket
    """Where the process waits until whoever asked for it knows of it."""
    end: int
    """Readable once the process has ended."""


class Forking:
    """What both templates do: wait for what happens, and fork."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.lock: int | None = None

    def watch(self, source: socket.socket | int, what: object = None) -> None:
        self.selector.register(source, selectors.EVENT_READ, what)

    def drop(self, source: socket.socket | int) -> None:
        self.selector.unregister(source)
        _close(source)

    def fork(self) -> int:
        """Fork. In the new process, close all that this one waits for."""
        with warnings.catch_warnings():
            # From Python 3.12 on, for threads: they are OpenBLAS's and jemalloc's, which both prepare for forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            for key in list(self.selector.get_map().values()):
                _close(key.fileobj)
            self.selector.close()
            if self.lock is not None:
                os.close(self.lock)  # else it would be locked for as long as any fork lives
        return pid


class ForJob(Forking):
    """The second template."""

    def __init__(self, first: socket.socket, env: Mapping[str, str], added: Mapping[str, str]) -> None:
        super().__init__()
        self._first = first
        os.environ.clear()
        os.environ.update({**env, **added})
        before = dict(os.environ)
        _import(WITH_RAY)
        self._added = {**added, **_new(before)}
        self.watch(first)

    def serve(self) -> tuple[Wanted, list[int]] | None:
        """Return, in each fork, what it is to be; None once the first template has ended."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self._first:
                    self._heard(key.data, ended=key.fileobj == key.data.end)
                    break  # what else was ready may have been closed with it
                message = receive(self._first)
                if message is None:
                    return None
                if (found := self._begin(*message)) is not None:
                    return found

    def _begin(self, message: dict[str, Any], files: list[int]) -> tuple[Wanted, list[int]] | None:
        connection = socket.socket(fileno=files.pop(0))
        gate, waits = socket.socketpair()
        pid = self.fork()
        if not pid:
            connection.close()
            gate.close()
            if not waits.recv(1):
                os._exit(0)
            waits.close()
            return Wanted(**message, added=self._added), files
        waits.close()
        for each in files:
            os.close(each)
        begun = Begun(pid, connection, gate, os.pidfd_open(pid))
        self.watch(connection, begun)
        self.watch(begun.end, begun)
        _answer(connection, pid=pid)
        return None

    def _heard(self, begun: Begun, *, ended: bool) -> None:
        """The worker has `ended`. Or the process that Ray takes for it says that the worker may begin, or has ended."""
        if not ended:
            with suppress(OSError):
                if begun.connection.recv(16):
                    begun.gate.sendall(b"g")
                    return
            with suppress(ProcessLookupError):
                os.kill(begun.pid, signal.SIGKILL)
        os.waitpid(begun.pid, 0)
        self.drop(begun.connection)
        self.drop(begun.end)
        begun.gate.close()


@dataclass(slots=True)
class SecondTemplate:
    """A second template, as the first one knows it."""

    pid: int
    pair: socket.socket
    env: Mapping[str, str]


class ForNode(Forking):
    """The first template."""

    def __init__(self, lock: int, listener: socket.socket, env: Mapping[str, str]) -> None:
        """`env`: what the environment was when the imports began."""
        super().__init__()
        self.lock = lock
        self._env = of_process(env)
        self._added = _new(env)
        self._listener = listener
        self._groups = ask.content("/proc/self/cgroup")
        self._worker = worker_of_ray()
        self._stamps = _stamps()
        self._jobs: list[SecondTemplate] = []
        self._owners = 0
        self._wanted = time.monotonic()
        self.watch(listener)

    def serve(self) -> ForJob | None:
        """Return in a second template that one; None once nobody wants this process any more."""
        while True:
            for key, _ in self.selector.select(_TICK_SECONDS):
                if key.fileobj is self._listener:
                    made = self._hear(self._listener.accept()[0])
                    if made is not None:
                        return made
                elif isinstance(key.data, SecondTemplate):
                    self._lost(key.data)
                elif not key.fileobj.recv(64):  # type: ignore[union-attr]
                    self._owners -= 1
                    self.drop(key.fileobj)  # type: ignore[arg-type]
                else:  # its driver has done. The second templates see that their pair ends; workers are Ray's.
                    return None
            if self._is_idle():
                return None

    def _hear(self, connection: socket.socket) -> ForJob | None:
        connection.settimeout(_READ_SECONDS)
        files: list[int] = []
        try:
            message = receive(connection) if user_of(connection) == os.getuid() else None
            if message is None:
                connection.close()
                return None
            asked, files = message
            if "argv" in asked:
                return self._asked(asked, connection, files)
            self._owners += 1
            connection.settimeout(None)
            self.watch(connection)
            if self._why_not_ours() is None and asked.get("env"):
                return self._for_job(asked["env"])[1]
        except (OSError, ValueError, KeyError, TypeError) as error:
            _say(f"a message was not understood: {error}")
            connection.close()
        finally:
            for each in files:
                os.close(each)
        return None

    def _asked(self, asked: dict[str, Any], connection: socket.socket, files: list[int]) -> ForJob | None:
        self._wanted = time.monotonic()
        why = self._why_not(Wanted(**asked))
        if why is None:
            known, made = self._for_job(asked["env"])
            if made is not None:
                connection.close()
                return made
            try:
                send(known.pair, asked, [connection.fileno(), *files])
            except OSError as error:
                why = f"the second template does not answer: {error}"
        if why is not None:
            _say(f"refused: {why}")
            _answer(connection, pid=None)
        connection.close()
        return None

    def _why_not(self, wanted: Wanted) -> str | None:
        """Say why a fork of this process might not be what a new one would be."""
        env = of_process(wanted.env)
        ours = self._env if OMP in env else {name: value for name, value in self._env.items() if name != OMP}
        if names := difference(ours, env):
            return f"the environment differs in {names}"
        if Path(wanted.argv[0]) != self._worker:
            return f"{wanted.argv[0]} is not {self._worker}"
        if wanted.groups != self._groups:
            return "its control groups differ"
        return self._why_not_ours()

    def _why_not_ours(self) -> str | None:
        changed = next((file for file, stamp in self._stamps.items() if _stamp(file) != stamp), None)
        return None if changed is None else f"{changed} has changed since it was imported"

    def _for_job(self, env: Mapping[str, str]) -> tuple[SecondTemplate, ForJob | None]:
        """Return the second template of this environment's job. It is forked if there is none yet."""
        for known in self._jobs:
            if known.env == of_job(env):
                return known, None
        ours, theirs = socket.socketpair()
        known = SecondTemplate(0, ours, of_job(env))
        _say(f"a job on a node: {known.env.get('RAY_JOB_ID')}, {known.env.get('RAY_RAYLET_PID')}")
        known.pid = self.fork()
        if not known.pid:
            ours.close()
            return known, ForJob(theirs, env, self._added)
        theirs.close()
        self._jobs.append(known)
        self.watch(ours, known)
        return known, None

    def _lost(self, known: SecondTemplate) -> None:
        self._jobs.remove(known)
        self.drop(known.pair)
        os.waitpid(known.pid, 0)

    def _is_idle(self) -> bool:
        for known in [each for each in self._jobs if not _forks(each.pid)]:
            if not psutil.pid_exists(int(known.env.get("RAY_RAYLET_PID") or 0)):
                known.pair.shutdown(socket.SHUT_RDWR)  # its node is gone; the second template ends, and is `_lost`
        if self._owners or any(_forks(known.pid) for known in self._jobs):
            self._wanted = time.monotonic()
        return time.monotonic() - self._wanted > LINGER_SECONDS


def _forks(pid: int) -> int:
    with suppress(psutil.Error):
        return len(psutil.Process(pid).children())
    return 0


def _answer(connection: socket.socket, *, pid: int | None) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _close(source: Any) -> None:
    if isinstance(source, int):
        os.close(source)
    else:
        source.close()


def _import(names: tuple[str, ...]) -> None:
    with importing(alone=True):  # so that no collection in a fork writes to all the memory that forks share
        for name in names:
            import_module(name)


def _new(before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set, and were not."""
    return {name: value for name, value in os.environ.items() if name not in before}


def _stamps() -> dict[str, tuple[int, int] | None]:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file: _stamp(file) for file in files if file}


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _begin(directory: Path, package: Path) -> ForNode | None:
    """Do the imports; None if another template serves here, or this one would not import the caller's code."""
    import raytune_fsdp
    from raytune_fsdp.launch.quiet import quiet

    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    if Path(raytune_fsdp.__file__).parent != package:
        return None
    (directory / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(directory / SOCKET))
    listener.listen(512)  # those who ask meanwhile wait: they would take as long to import it all
    _write_launcher(directory)
    env = dict(os.environ)
    quiet()  # as ranks do before they import transformers
    began = time.monotonic()
    _import(WITHOUT_RAY)
    assert "ray" not in sys.modules, "Ray's C++ would have read this environment, which is no worker's"
    _say(f"ready after {time.monotonic() - began:.1f} s")
    return ForNode(lock, listener, env)


def _write_launcher(directory: Path) -> None:
    program = [sys.executable, "-IS", ask.__file__, str(directory / SOCKET)]
    new = directory / f"{LAUNCHER}.new"
    new.write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
    new.chmod(0o700)
    new.rename(directory / LAUNCHER)


def main(directory: Path, package: Path, threads: str) -> None:
    if os.fork():
        os._exit(0)  # Ray ends the children of its processes with them: this one is to be nobody's
    os.environ.setdefault(OMP, threads)
    sys.path[0] = str(worker_of_ray().parent)  # where Python puts the directory of a program that it runs
    node = _begin(directory, package)
    if node is None:
        return
    job = node.serve()
    if job is None:
        shutil.rmtree(directory, ignore_errors=True)
        return
    asked = job.serve()
    if asked is not None:
        run(*asked)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
