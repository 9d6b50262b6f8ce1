"""The Ray that a run uses: the one it is part of or finds, else one that is started on this machine for it alone."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil
import ray

# Ray's own search for a cluster, as in ray.init() without an address; there is no public way to ask what it would find.
from ray._private.services import canonicalize_bootstrap_address, parse_address

from raytune_fsdp.config import ClusterConfig, FinetuneConfig
from raytune_fsdp.errors import ConfigError, TrainingError
from raytune_fsdp.launch.ray.resources import local_cpus, nodes

logger = logging.getLogger(__name__)

_PREFIX = "raytune-ray-"
_LONGEST_PARENT = 24
_CLOSE_SECONDS = 30.0
_COPIES = "working_dir_files"
"""Where Ray puts the working directories of submitted jobs."""
_KNOCK_SECONDS = 15.0
_QUICK = {
    "RAY_USAGE_STATS_ENABLED": "0",  # telemetry is not ours to send
    "RAY_enable_metrics_collection": "0",  # nobody reads them without a dashboard, and it takes a second to start
    "RAY_prestart_worker_first_driver": "0",  # ranks and what they start have an environment of their own
}
"""A Ray for one run on one machine starts faster without these."""
_OBJECT_STORE_BYTES = 2 << 30


@dataclass(slots=True)
class Session:
    """A connection to Ray. Close it: a Ray of our own ends with it, and its files are removed."""

    about: str
    """What it is, for people."""
    owned: bool
    """Whether the connection was made here."""
    directory: Path | None = None
    lock: int | None = None
    environment: tuple[str, ...] = ()
    """Variables that were set for it; the next Ray of this process may be another one."""

    def close(self) -> None:
        if self.owned:
            ray.shutdown()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)
        for name in self.environment:
            os.environ.pop(name, None)


def check_not_in_a_copy(config: FinetuneConfig, run_dir: Path) -> None:
    """A submitted job runs in a copy of the working directory, which Ray removes."""
    if _COPIES in run_dir.parts:
        raise ConfigError(
            f"run.storage={config.run.storage} is inside of this job's copy of the working directory, which Ray "
            "removes with the job; set it to an absolute path, on storage that all nodes mount"
        )


@contextmanager
def connecting(config: ClusterConfig, workers: int) -> Iterator[Future[Session]]:
    """A connection that is being made meanwhile, and is closed in the end."""
    session: Future[Session] = Future()
    ended = Event()

    def run() -> None:
        try:
            session.set_result(connect(config, workers))
        except BaseException as error:
            session.set_exception(error)
        # The processes of a Ray that was started here end with this thread: Linux takes it for their parent.
        ended.wait()

    # A daemon: what cannot be waited for is left to the end of this process.
    Thread(target=run, name="ray", daemon=True).start()
    try:
        yield session
    finally:
        if wait([session], timeout=_CLOSE_SECONDS).done and session.exception() is None:
            session.result().close()
        ended.set()


def connect(config: ClusterConfig, workers: int) -> Session:
    """Join the cluster that ray.init() would join, or start one that is large enough for so many workers."""
    if ray.is_initialized():
        return Session(f"connected already, {_size()}", owned=False)
    try:
        address = canonicalize_bootstrap_address(None)
    except (ValueError, ConnectionError) as error:
        raise ConfigError(
            f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: {_first_line(error)}; it must be HOST:PORT of a head, or "
            "local for a Ray of this run's own. From outside of a cluster use ray job submit"
        ) from None
    if address is None:
        return _start(local_cpus(config, workers))
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of many kinds: nobody there, another version, no token
        raise TrainingError(
            f"the Ray cluster at {address} cannot be joined ({type(error).__name__}: {_first_line(error)}). It was "
            "named by RAY_ADDRESS, or is the last one that `ray start` has started here; with RAY_ADDRESS=local one is "
            "started for this run"
        ) from error
    return Session(f"joined the cluster at {address}, {_size()}", owned=True)


def _knock(address: str) -> None:
    """Find out in seconds that nobody is there: ray.init() would wait for many minutes."""
    host, port = parse_address(address)
    socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def _start(cpus: int) -> Session:
    directory, lock = _own_directory()
    # Whoever else is on this machine must not reach what runs here. Where RAY_AUTH_MODE is not set Ray asks for a token
    # from everyone. It would write one to the home directory; this one is for this run alone.
    own = {"RAY_AUTH_TOKEN": secrets.token_hex(32), **_QUICK}
    before = dict(os.environ)
    for name, value in own.items():
        os.environ.setdefault(name, value)
    added = [name for name in (*own, "RAY_AUTH_MODE") if name not in before]
    session = Session("", owned=True, directory=directory, lock=lock, environment=tuple(added))
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=max(256 << 20, min(_OBJECT_STORE_BYTES, psutil.virtual_memory().total // 4)),
            _temp_dir=str(directory),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # of many kinds: a port, memory, a process that did not start
        session.close()
        raise TrainingError(
            f"Ray could not be started on this machine ({_first_line(error)}); cluster.launch=local does without it"
        ) from error
    session.about = f"started on this machine, {_size()}"
    return session


def _own_directory() -> tuple[Path, int]:
    """A directory for Ray's files. What a run that was killed has left is removed."""
    # It becomes part of the names of sockets, whose length has a limit.
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_PARENT and Path("/tmp").is_dir():
        parent = Path("/tmp")
    for left in parent.glob(f"{_PREFIX}*"):
        if left.is_dir() and not _is_in_use(left):
            shutil.rmtree(left, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock


def _is_in_use(directory: Path) -> bool:
    try:
        with open(directory / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked; or it has none yet, or is someone else's
        return True
    return False


def _size() -> str:
    found = nodes()
    cpus = sum(node.total.get("CPU", 0) for node in found)
    gpus = sum(node.total.get("GPU", 0) for node in found)
    parts = [f"{cpus:g} CPUs"] + ([f"{gpus:g} GPUs"] if gpus else [])
    return f"{len(found)} nodes, {', '.join(parts)}" if len(found) > 1 else f"{', '.join(parts)}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
