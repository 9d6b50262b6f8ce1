"""The process that others are forked from.

    python raytune_fsdp/launch/ray/forked/template.py DIRECTORY PACKAGE THREADS BEGUN_AS

It imports what a worker needs but Ray, and serves a socket in its directory. Ray itself is imported by each fork: its
C++ reads the environment when it is loaded, and draws random ids from a state that forks would share (two workers gave
their tasks the same ids, and Ray ended the one that ran both). The template draws no random number, runs no work and
touches no GPU, so a fork is what a new process would be after the same imports. In any doubt a request is refused:
another environment, code that was written after it was imported, another Ray, other control groups. The process that
has asked then starts Python.

It outlives a driver that is killed, and serves the next command of the run, which asks within seconds; where it would
refuse the forks of that one, it makes room for another template. Runs of a sweep share it, so it may have several
drivers. It ends when the last one says so, or once nobody has wanted it for a minute.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import selectors
import shlex
import shutil
import signal
import socket
import stat
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytune_fsdp.launch.importing import importing
from raytune_fsdp.launch.ray.forked import ask
from raytune_fsdp.launch.ray.forked.messages import ENDS, KEPT, LATER, receive, user_of
from raytune_fsdp.launch.ray.forked.process import (
    ASK,
    DIRECTORIES,
    LAUNCHER,
    OMP,
    SOCKET,
    Wanted,
    difference,
    is_relative,
    of_process,
    run,
    worker_of_ray,
)

_LOCK = "lock"
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch.cuda.is_available(), which libraries call while they are imported, does not touch CUDA."""
LINGER_SECONDS = 60.0
"""How long it stays without a driver and without a worker."""
_TICK_SECONDS = 2.0
_READ_SECONDS = 5.0
_OLD_SECONDS = 3600.0
IMPORTS = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers", "raytune_fsdp.launch.worker",
    "raytune_fsdp.launch.shared_storage", "raytune_fsdp.predict.preflight",
    # What Ray imports of others, where it is installed.
    "pandas", "pyarrow", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet", "pydantic", "requests", "jsonschema",
    "google.protobuf.message", "msgpack", "click", "attr", "fsspec",
)  # fmt: skip


@dataclass(slots=True)
class Begun:
    """A process that was forked, and the connection that was opened to ask for it."""

    pid: int
    connection: socket.socket
    gate: socket.socket
    """Where the process waits until whoever asked for it knows of it."""
    end: int
    """Readable once the process has ended."""


class NodeTemplate:
    """Forks. `serve` returns, in each fork, what it is to be."""

    def __init__(self, lock: int, listener: socket.socket, env: Mapping[str, str], begun_as: str) -> None:
        """`env`: what the environment was when the imports began. `begun_as`: what decides whether it could serve
        another driver."""
        self._env = of_process(env)
        self._begun_as = begun_as
        self.replaced = False
        """Whether another template may begin in its directory."""
        self._added = {name: value for name, value in os.environ.items() if name not in env}
        self._lock, self._listener = lock, listener
        self._groups, self._cwd = ask.groups(), os.getcwd()
        self._worker = worker_of_ray()
        self._stamps = _stamps()
        self._selector = selectors.DefaultSelector()
        self._forks = 0
        self._owners = 0
        self._wanted = time.monotonic()
        self._watch(listener)

    def _watch(self, source: socket.socket | int, what: object = None) -> None:
        self._selector.register(source, selectors.EVENT_READ, what)

    def _drop(self, source: socket.socket | int) -> None:
        self._selector.unregister(source)
        _close(source)

    def serve(self) -> tuple[Wanted, list[int]] | None:
        """Return in a fork what it is to be; None once nobody wants this process any more."""
        while True:
            for key, _ in self._selector.select(_TICK_SECONDS):
                if key.fileobj is self._listener:
                    if (found := self._hear()) is not None or self.replaced:
                        return found
                elif isinstance(key.data, Begun):
                    self._heard(key.data, ended=key.fileobj == key.data.end)
                    break  # what else was ready may have been closed with it
                else:
                    self._owners -= 1
                    if _has_said_end(key.fileobj) and not self._owners:  # type: ignore[arg-type]
                        return None  # its last driver has done; workers are Ray's
                    self._drop(key.fileobj)  # type: ignore[arg-type]
            if self._owners or self._forks:
                self._wanted = time.monotonic()
            elif time.monotonic() - self._wanted > LINGER_SECONDS:
                return None

    def _hear(self) -> tuple[Wanted, list[int]] | None:
        """Hear from a process that has connected: a driver's, which keeps the connection, or one that wants a fork."""
        try:
            connection = self._listener.accept()[0]
        except OSError as error:  # no file is left: forks take three each
            _say(f"a connection was not taken: {error}")
            time.sleep(_TICK_SECONDS)
            return None
        connection.settimeout(_READ_SECONDS)
        files: list[int] = []
        try:
            message = receive(connection) if user_of(connection) == os.getuid() else None
            connection.settimeout(None)
            if message is None:
                connection.close()
                return None
            asked, files = message
            if "argv" not in asked:
                self._own(connection, asked.get("begun_as"))
                return None
            wanted = Wanted(**asked, added=self._added)
            if (why := self._why_not(wanted)) is None:
                return self._begin(wanted, connection, files)
            _say(f"refused: {why}")
            _answer(connection, pid=None)
        except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:  # from a process of ours, or not
            _say(f"a message was not understood: {error}")
        for each in files:
            os.close(each)
        connection.close()
        return None

    def _own(self, connection: socket.socket, begun_as: str | None) -> None:
        """Stay for a driver, or make room for what it would begin. `begun_as`: None if it has begun this template."""
        unlike = begun_as is not None and (begun_as != self._begun_as or self._changed() is not None)
        self.replaced = unlike and not self._owners and not self._forks
        if self.replaced:
            _say("ends: its driver is gone, and it would refuse the forks of the next one")
            self._drop(self._listener)
            os.close(self._lock)
        if begun_as is not None:
            with suppress(OSError):
                connection.sendall(ENDS if self.replaced else LATER if unlike else KEPT)
        if unlike:
            connection.close()
        else:
            self._owners += 1
            self._watch(connection)

    def _why_not(self, wanted: Wanted) -> str | None:
        """Say why a fork of this process might not be what a new one would be."""
        env = of_process(wanted.env)
        ours = self._env if OMP in env else {name: value for name, value in self._env.items() if name != OMP}
        if names := difference(ours, env):
            return f"the environment differs in {names}"
        if Path(wanted.argv[0]) != self._worker:
            return f"{wanted.argv[0]} is not {self._worker}"
        if wanted.groups != self._groups:
            return "its control groups or namespaces differ"
        if wanted.cwd != self._cwd and is_relative(wanted.env):
            return f"its directory is not {self._cwd}, and PYTHONPATH is relative"
        changed = self._changed()
        return None if changed is None else f"{changed} has changed since it was imported"

    def _changed(self) -> str | None:
        """Return a file that was written since it was imported."""
        return next((file for file, stamp in self._stamps.items() if _stamp(file) != stamp), None)

    def _begin(self, wanted: Wanted, connection: socket.socket, files: list[int]) -> tuple[Wanted, list[int]] | None:
        """Fork. The fork waits until whoever asked for it knows of it: else there might be two workers in its place."""
        gate, waits = socket.socketpair()
        with warnings.catch_warnings():
            # From Python 3.12 on, for threads: they are OpenBLAS's and jemalloc's, which both prepare for forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            for each in (gate, connection, *(key.fileobj for key in list(self._selector.get_map().values()))):
                _close(each)
            self._selector.close()
            os.close(self._lock)  # else it would be locked for as long as any fork lives
            if not waits.recv(1):
                os._exit(0)
            waits.close()
            return wanted, files
        waits.close()
        try:
            begun = Begun(pid, connection, gate, os.pidfd_open(pid))
        except OSError:  # no file is left, or a sandbox without it
            gate.close()  # so it ends
            os.waitpid(pid, 0)
            raise
        for each in files:
            os.close(each)
        self._forks += 1
        self._watch(connection, begun)
        self._watch(begun.end, begun)
        _answer(connection, pid=pid)
        return None

    def _heard(self, begun: Begun, *, ended: bool) -> None:
        """The worker has `ended`. Or the process that Ray takes for it says that the worker may begin, or has ended."""
        if not ended:
            with suppress(OSError):
                if begun.connection.recv(16):
                    begun.gate.sendall(b"g")
                    return
            os.kill(begun.pid, signal.SIGKILL)
            self._drop(begun.connection)
            return  # nobody waits for it here: the kernel may take long to end it
        os.waitpid(begun.pid, 0)
        self._forks -= 1
        if begun.connection.fileno() >= 0:
            self._drop(begun.connection)
        self._drop(begun.end)
        begun.gate.close()


def _has_said_end(driver: socket.socket) -> bool:
    """Return whether a driver has done, and not only gone."""
    with suppress(ConnectionResetError):  # it was killed before it read what it was told
        return bool(driver.recv(64))
    return False


def _answer(connection: socket.socket, *, pid: int | None) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _close(source: Any) -> None:
    if isinstance(source, int):
        os.close(source)
    else:
        source.close()


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


def _begin(directory: Path, package: Path, begun_as: str) -> NodeTemplate | None:
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
    _write_launcher(directory)  # who finds a socket finds it, too
    (directory / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(directory / SOCKET))
    listener.listen(512)  # those who ask meanwhile wait: they would take as long to import it all
    clear(directory.parent)
    env = dict(os.environ)
    quiet()  # as ranks do before they import transformers
    os.environ[_BY_NVML] = env.get(_BY_NVML, "1")
    began = time.monotonic()
    with importing(alone=True):  # so that no collection in a fork writes to all the memory that forks share
        for name in IMPORTS:
            if find_spec(name.partition(".")[0]) is not None:
                import_module(name)
    assert "ray" not in sys.modules
    if _BY_NVML not in env:
        del os.environ[_BY_NVML]
    _say(f"ready after {time.monotonic() - began:.1f} s")
    return NodeTemplate(lock, listener, env, begun_as)


def _write_launcher(directory: Path) -> None:
    # A copy: this directory may outlive a template that is killed, and the code that a job has brought with it.
    program = [sys.executable, "-IS", str(directory / ASK), str(directory / SOCKET)]
    texts = {ASK: Path(ask.__file__).read_text(), LAUNCHER: f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n'}
    for name, text in texts.items():
        new = directory / f"{name}.new"
        new.write_text(text)
        new.chmod(0o700)
        new.rename(directory / name)  # at once: Ray may be starting the one of a template that was killed


def clear(parent: Path) -> None:
    """Remove what templates of this user have left that were killed long ago."""
    for each in parent.glob(f"{DIRECTORIES}*"):
        with suppress(OSError):
            facts = each.lstat()
            if (
                stat.S_ISDIR(facts.st_mode)
                and facts.st_uid == os.getuid()
                and time.time() - facts.st_mtime > _OLD_SECONDS
            ):
                lock = os.open(each / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                with os.fdopen(lock):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(each)


def main(directory: Path, package: Path, threads: str, begun_as: str = "") -> None:
    if os.fork():
        os._exit(0)  # Ray ends the children of its processes with them: this one is to be nobody's
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # each fork takes three files here, and has its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.setdefault(OMP, threads)
    if not sys.flags.safe_path:
        sys.path[0] = str(worker_of_ray().parent)  # where Python puts the directory of a program that it runs
    template = _begin(directory, package, begun_as)
    if template is None:
        return
    asked = template.serve()
    if asked is not None:
        run(*asked)
    elif not template.replaced:
        (directory / LAUNCHER).unlink(missing_ok=True)  # first: it needs the others
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
