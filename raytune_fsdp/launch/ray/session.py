"""The Ray that a run uses: the one it belongs to or finds, or else one started on this machine for this run alone."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil
import ray
from ray.exceptions import AuthenticationError

from raytune_fsdp.base.errors import ConfigError, TrainingError, first_line, in_one_line
from raytune_fsdp.base.leaving import crashing
from raytune_fsdp.config import ClusterConfig, FinetuneConfig
from raytune_fsdp.launch.ray import private
from raytune_fsdp.launch.ray.forked.templates import Templates
from raytune_fsdp.launch.ray.resources import local_cpus, nodes
from raytune_fsdp.launch.ray.watch.head import CLOSING_SECONDS, DIED, Head

logger = logging.getLogger(__name__)

_PREFIX = "raytune-ray-"
_LOCK = "lock"
_LONGEST_PARENT = 24  # the path becomes part of the names of sockets, which may have 107 bytes on Linux
_CLOSE_SECONDS = 8.0
"""How long the end of the command waits for a Ray that is still starting: a stop should not take longer than 10 s. If
this process lives on, that Ray is closed once it has started; if not, its processes end with this one, and the next
start removes its directory."""
_WORKERS_SECONDS = 3.0
"""How long workers of a Ray that was started here may outlive it. They end when they see that it has, except one whose
C++ waits for itself in its exit (Ray 2.60, seen once in some hundred runs): only SIGKILL ends that."""
_COPIES = "working_dir_files"
"""Where Ray puts the working directories of submitted jobs."""
_LOOK_SECONDS = 1.0
_KNOCK_SECONDS = 15.0  # for a head on a slow network; ray.init() would try for many minutes
_late: list[Event] = []
"""Events, one for each command of this process whose Ray was still starting at its end: set when it is closed."""
QUICK = {
    "RAY_USAGE_STATS_ENABLED": "0",  # telemetry is not ours to send
    "RAY_enable_metrics_collection": "0",  # useless without a dashboard, and its start takes a second
    "RAY_prestart_worker_first_driver": "0",  # unused: ranks and their tasks have another environment
}
"""Settings with which a Ray for one run on one machine starts faster."""
LIMITS = (
    "RAY_gcs_server_port_wait_time_s", "RAY_raylet_start_wait_time_s", "RAY_worker_register_timeout_seconds",
)  # fmt: skip
"""Limits of Ray's on parts of its start, 30 s each, and on that of a worker, 60 s. A further one, for its node to be
known, cannot be set."""
_MAKING_SECONDS = 3600.0  # far longer than a new directory is without its lock
_NEEDED = ("gcs_server", "raylet")
_OBJECT_STORE_BYTES = 2 << 30  # the stream fills a quarter with windows built ahead, and READY_BYTES with blocks


@dataclass(slots=True)
class Session:
    """A connection to Ray, to be closed: a Ray that was started for the run then ends, and its files are removed."""

    about: str
    """Which Ray it is, for messages."""
    owned: bool
    """Whether the connection was made here."""
    head: Head | None = None
    """The head of a cluster that was joined, here or by the caller; None: the Ray was started here."""
    directory: Path | None = None
    lock: int | None = None
    environment: tuple[str, ...] = ()
    """Variables that were set for it, and must not affect the next Ray of this process."""
    templates: Templates | None = None
    """The processes from which workers are forked."""

    def lost(self) -> str | None:
        """Say what has ended, if this Ray cannot go on without it."""
        if self.head is not None:
            return self.head.lost()
        dead = private.dead_processes() if self.directory is not None else []
        return next((f"Ray's {kind} process on this machine {DIED}" for kind in dead if kind in _NEEDED), None)

    def answers(self) -> bool:
        """Return whether calls to this Ray come back soon."""
        return self.lost() is None if self.head is None else self.head.answers()

    def close(self) -> None:
        if self.templates is not None and self.answers():
            self.templates.end_on_nodes()
        ours = self.directory is None or not private.is_elsewhere(self.directory)
        workers = private.workers() if ours and self.directory is not None else []
        if self.head is not None:
            self.head.close()
            if self.owned and self.head.lost() is not None:
                # Ray's C++ cannot bear another cluster: it would end this process by SIGSEGV, in Python's exit. For a
                # head that is away it waits there, and for longer if that comes back meanwhile and goes again.
                crashing.append("Ray, which has lost its head")
        elif ours and self.lost():
            private.kill_processes()  # ray.shutdown() alone would talk to them for a while
        if ours and self.owned:
            ray.shutdown()
        for each in psutil.wait_procs(workers, timeout=_WORKERS_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        if self.directory is not None:
            _remove(self.directory)
            _sweep(self.directory.parent)  # what others of this machine could not remove before
        if self.lock is not None:
            os.close(self.lock)
        for name in self.environment:
            os.environ.pop(name, None)


def check_not_in_a_copy(config: FinetuneConfig, run_dir: Path) -> None:
    """Refuse to write the run into the copy of the working directory of a submitted job: Ray removes it."""
    if _COPIES in run_dir.parts:
        raise ConfigError(
            f"run.storage={config.run.storage} is inside this job's copy of the working directory, which Ray "
            "removes with the job; set it to an absolute path, on storage that all nodes mount"
        )


@contextmanager
def connecting(config: ClusterConfig, workers: int, templates: Templates | None = None) -> Iterator[Future[Session]]:
    """Connect to Ray in a thread while the context lasts; close the connection at its end."""
    for closed in list(_late):
        closed.wait(config.start_seconds)
    address = find_cluster()
    if templates is not None and address is None and not ray.is_initialized():
        templates.begin_here()
    session: Future[Session] = Future()
    ended, closed = Event(), Event()

    def run() -> None:
        try:
            session.set_result(connect(config, workers, address, templates))
        except BaseException as error:
            session.set_exception(error)
        # The thread must outlive the run: for Linux it is the parent of the Ray processes, which end with it.
        if session.exception() is None:
            _watch(session.result(), ended)
        ended.wait()
        try:
            if session.exception() is None:
                session.result().close()
        finally:
            if templates is not None:
                templates.end_here()  # last: until then it ends the forks of what is killed
            closed.set()
            _late.remove(closed)

    # A daemon, so that a Ray that does not start cannot keep this process from ending.
    Thread(target=run, name="ray", daemon=True).start()
    try:
        yield session
    finally:
        _late.append(closed)  # first: a stop may end the wait
        ended.set()
        closed.wait(_CLOSE_SECONDS)


def _watch(session: Session, ended: Event) -> None:
    """Say what has ended, if the main thread cannot: it waits in a call that began just before, and Ray ends it now."""
    since: float | None = None
    while session.head is None and not ended.wait(_LOOK_SECONDS):
        since = None if session.lost() is None else since or time.monotonic()
        if since is not None and time.monotonic() - since > private.seconds_without_head() - CLOSING_SECONDS:
            print(f"error: {session.lost()}; the same command continues", file=sys.stderr, flush=True)
            return


def find_cluster() -> str | None:
    """Return the address of the cluster that ray.init() would join, once it has answered; None if there is none.

    Refuses in milliseconds, before any heavy import, what ray.init() would try for a minute or many.
    """
    if ray.is_initialized():
        return None
    try:
        address = private.address_of_cluster()
    except (ValueError, ConnectionError) as error:
        raise ConfigError(
            f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: {first_line(error)}; it must be HOST:PORT of a head, or "
            "local to start a Ray for this run. From outside a cluster use `ray job submit`"
        ) from None
    if address is not None:
        with _joining(address):
            socket.create_connection(private.host_and_port(address), timeout=_KNOCK_SECONDS).close()
            with stderr_muted():  # C++ warns of a wrong token
                private.check_token(address)
    return address


def connect(config: ClusterConfig, workers: int, address: str | None, templates: Templates | None = None) -> Session:
    """Join the cluster at this address. Without one, use the Ray there is, or start one that is large enough."""
    if ray.is_initialized():
        head = Head(ray.get_runtime_context().gcs_address)
        return Session(f"connected already, {_size()}", owned=False, head=head)
    if address is None:
        return _start(local_cpus(config, workers), config.start_seconds, templates)
    with _joining(address):
        # log_to_driver=False: each rank writes its own file in the run directory.
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_runtime_env(templates))
    about = f"joined the cluster at {address}, {_size()}"
    return Session(about, owned=True, head=Head(address), templates=templates)


def _runtime_env(templates: Templates | None) -> dict[str, str] | None:
    return None if templates is None else templates.runtime_env() or None


@contextmanager
def _joining(address: str) -> Iterator[None]:
    """Say what to do about a cluster that cannot be joined."""
    try:
        yield
    except AuthenticationError as error:
        used = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
        has = "missing, or not the cluster's" if used else "not used here"
        raise ConfigError(
            f"the Ray cluster at {address} asks for a token, and the one of this process is {has}: set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to what they were at its `ray start`; with RAY_ADDRESS=local a Ray "
            "is started for this run"
        ) from error
    except Exception as error:  # of many types: nothing listens, another version
        raise TrainingError(
            f"the Ray cluster at {address} cannot be joined ({in_one_line(error)}). It was named by "
            "RAY_ADDRESS, or is the last one that `ray start` started here; with RAY_ADDRESS=local a Ray is started "
            "for this run"
        ) from error


def _start(cpus: int, seconds: float, templates: Templates | None = None) -> Session:
    """Start a Ray, again where the machine was too busy for Ray's own limits, within these seconds."""
    began = time.monotonic()
    while True:
        try:
            return _try_to_start(cpus, seconds, templates)
        except Exception as error:  # of many types: a port, memory, a process that did not start
            left = seconds - (time.monotonic() - began)
            if left > 0 and "timed out" in str(error).lower():
                continue
            raise TrainingError(
                f"Ray could not be started on this machine in {time.monotonic() - began:.0f} s ({in_one_line(error)}); "
                f"if it is busy, raise cluster.start_seconds={seconds:g}; cluster.launch=local does without Ray"
            ) from error


def _try_to_start(cpus: int, seconds: float, templates: Templates | None = None) -> Session:
    directory, lock = _own_directory()
    # Other users of this machine must not reach what runs here. Unless RAY_AUTH_MODE is set, Ray asks everyone for a
    # token. It would write one to the home directory; this one is for this run alone.
    own = {"RAY_AUTH_TOKEN": secrets.token_hex(32), **QUICK, **dict.fromkeys(LIMITS, str(math.ceil(seconds)))}
    before = dict(os.environ)
    for name, value in own.items():
        os.environ.setdefault(name, value)
    added = [name for name in (*own, "RAY_AUTH_MODE") if name not in before]
    private.forget_token()  # a second run of this process has another one
    session = Session("", owned=True, directory=directory, lock=lock, environment=tuple(added), templates=templates)
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=max(256 << 20, min(_OBJECT_STORE_BYTES, psutil.virtual_memory().total // 4)),
            _temp_dir=str(directory),
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=_runtime_env(templates),
        )
    except BaseException:
        session.close()
        # Ray forgets the processes of a start that has failed; some would go on until this one ends.
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if any(str(directory) in argument for argument in each.cmdline()):
                    each.kill()
        raise
    session.about = f"started on this machine, {_size()}"
    return session


def _own_directory() -> tuple[Path, int]:
    """Make a directory for Ray's files; return it and its lock. Remove directories that killed runs left behind."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_PARENT and Path("/tmp").is_dir():
        parent = Path("/tmp")
    _sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock


def _sweep(parent: Path) -> None:
    for left in parent.glob(f"{_PREFIX}*"):
        if _is_ours(left) and not _is_in_use(left):
            _remove(left)


def _is_ours(path: Path) -> bool:
    """Return whether it is a directory of this user. By that name another one may have a link in /tmp, to anything."""
    with suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _remove(directory: Path) -> None:
    """Remove a directory of Ray's, unless its processes still write there: then its lock stays, for the next to try.

    The agents of a run that was killed live on for up to 80 seconds.
    """
    with suppress(OSError):
        for each in directory.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != _LOCK:
                each.unlink()
        if [each.name for each in directory.iterdir()] == [_LOCK]:
            (directory / _LOCK).unlink()
        directory.rmdir()
    if directory.is_dir():
        with suppress(OSError):
            (directory / _LOCK).touch(0o600)


def _is_in_use(directory: Path) -> bool:
    try:
        with open(directory / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # it has no lock yet, or its process was killed just before it made one
        with suppress(OSError):
            return time.time() - directory.stat().st_mtime < _MAKING_SECONDS
        return True
    except OSError:  # locked, or it belongs to another user
        return True
    return False


@contextmanager
def stderr_muted() -> Iterator[None]:
    """Drop what C++ prints meanwhile. For calls of milliseconds: what other threads print is dropped, too."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _size() -> str:
    found = nodes()
    cpus = sum(node.total.get("CPU", 0) for node in found)
    gpus = sum(node.total.get("GPU", 0) for node in found)
    parts = [f"{cpus:g} CPUs"] + ([f"{gpus:g} GPUs"] if gpus else [])
    return f"{len(found)} nodes, {', '.join(parts)}" if len(found) > 1 else f"{', '.join(parts)}"
