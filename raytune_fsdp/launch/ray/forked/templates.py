"""The templates of a run, as its driver has them: where there is one, what Ray starts instead of Python, until when.

The trials of a sweep share them: a trial with its own would begin it at its first step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

import raytune_fsdp
from raytune_fsdp.base.errors import JOB_CONFIG
from raytune_fsdp.base.hushed import is_verbose
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.environment import SHARED
from raytune_fsdp.launch.ray.forked import ask
from raytune_fsdp.launch.ray.forked.messages import KEPT, LATER, send
from raytune_fsdp.launch.ray.forked.process import (
    ASK,
    DIRECTORIES,
    LAUNCHER,
    LOG,
    SOCKET,
    is_relative,
    of_process,
    worker_of_ray,
)
from raytune_fsdp.launch.ray.placement_groups import started_on

_PARENT = Path("/tmp")  # on every node the same, and short: the path of a socket has 107 bytes at most
_BEGINS_SECONDS = 10.0
"""How long a template may take to open its socket, which it does before its imports."""
_LOOK_SECONDS = 0.05
_ENDS_SECONDS = 2.0
_OWN_PYTHON = {"pip", "uv", "conda", "container", "image_uri", "py_executable", "nsight", "rocprof_sys", "java_jars"}
"""Fields of a job's runtime environment that decide which Python its workers are, or how that is started."""
_PROGRAM = """
d={directory}; [ -O "$d" ] && [ ! -L "$d" ] && [ -s "$d"/{ask} ] && [ -x "$d"/{launcher} ] && exec "$d"/{launcher} "$@"
[ "$1" = {worker} ] && [ -x {python} ] && exec {python} "$@"
p="${{1%/lib*/python3*}}/bin/python3"; [ -x "$p" ] && exec "$p" "$@"
exec python3 "$@"
"""
"""What Ray starts for each worker, in bash: the template's launcher, else this process's Python where the node has the
same Ray at the same place, else the Python that the worker's Ray is installed in."""


class Templates:
    """Where the workers of one run, or of runs that share them, may be forked."""

    def __init__(self, config: ClusterConfig, run_dir: Path) -> None:
        self._threads = str(config.cpus_per_worker)  # as Ray sets OMP_NUM_THREADS for a rank
        self._env = config.env
        self._shared = os.environ.get(SHARED)
        self._directory = directory_of(Path(self._shared or run_dir), self._threads)
        self._here: Future[socket.socket | None] | None = None
        self._actors: dict[str, Any] = {}
        self.used = config.fork_workers and possible()

    def runtime_env(self) -> dict[str, str]:
        """Return what makes Ray ask a template for its workers; nothing if it is to start Python."""
        if not self.used:
            return {}
        quoted = {
            "directory": self._directory, "ask": ASK, "launcher": LAUNCHER, "worker": worker_of_ray(),
            "python": sys.executable,
        }  # fmt: skip
        program = _PROGRAM.format(**{name: shlex.quote(str(value)) for name, value in quoted.items()})
        return {"py_executable": f"bash -c {shlex.quote(program)} worker"}

    def begin_here(self) -> None:
        """Begin a template on this node. It imports while Ray starts, with the environment that Ray will have."""
        if self.used:
            env = {**os.environ, **self._env}
            self._here = in_thread(lambda: own(self._directory, self._threads, env), "template")

    def begin_on(self, nodes: Collection[str]) -> None:
        """Begin one on each of these nodes that has none, and on the driver's, where Ray Train's controller is."""
        if not self.used or self._here is not None:
            return
        for node in {*nodes, ray.get_runtime_context().get_node_id()} - self._actors.keys():
            self._actors[node] = started_on(node, _OWNER, str(self._directory), self._threads, self._env)

    def end_on_nodes(self) -> None:
        """End those of a cluster: the run is over, or will be begun again by another command at another time.

        Shared ones are left to the next run: a minute after the last one they end by themselves.
        """
        if self._shared:
            return
        with suppress(RayError):
            ray.get([actor.end.remote() for actor in self._actors.values()], timeout=_ENDS_SECONDS)

    def end_here(self) -> None:
        here = None if self._here is None else self._here.result()
        if here is not None:
            release(here)


class _Owner:
    """The actor on a node, which keeps the node's template alive."""

    def __init__(self, directory: str, threads: str, env: Mapping[str, str]) -> None:
        # Not os.environ: Ray has hidden GPUs from this actor there, and has set OMP_NUM_THREADS for it.
        begun_with = dict(
            part.split("=", 1)
            for part in Path("/proc/self/environ").read_text(errors="surrogateescape").split("\0")
            if "=" in part
        )
        self._connection = own(Path(directory), threads, {**begun_with, **env})

    def end(self) -> None:
        if self._connection is not None:
            release(self._connection)


_OWNER = ray.remote(num_cpus=0)(_Owner)


def directory_of(run_dir: Path, threads: str) -> Path:
    """Return the directory of a run's templates, on every node the same.

    Another version or tree of the code has another one, and so has a command that gives its ranks another number of
    threads: templates of the last one may live on for a minute.
    """
    tree = [sys.prefix, *raytune_fsdp.__path__, raytune_fsdp.__version__, ray.__version__]
    of = [str(os.getuid()), str(run_dir), *tree, threads]
    return _PARENT / f"{DIRECTORIES}{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]}"


def possible() -> bool:
    """Return whether workers of this process's job can be forked: nothing else decides how they are started."""
    job = json.loads(os.environ.get(JOB_CONFIG) or "{}")
    own = (job.get("runtime_env") or {}).keys() & _OWN_PYTHON
    try:
        os.close(os.pidfd_open(os.getpid()))
        hooked = "RAY_RUNTIME_ENV_HOOK" in os.environ or any(each.name() == "uv" for each in psutil.Process().parents())
    except (OSError, AttributeError, psutil.Error):  # an old kernel, a sandbox, no Linux; a parent that has just ended
        return False
    return not own and not hooked and not is_verbose()


def own(directory: Path, threads: str, env: Mapping[str, str]) -> socket.socket | None:
    """Begin the template of this node with this environment, unless there is one.

    Return the connection that keeps it; None if it fails.
    """
    try:
        directory.mkdir(0o700, exist_ok=True)
        if directory.lstat().st_uid != os.getuid() or directory.is_symlink():
            return None
        begun_as = _begun_as(env)
        if (connection := _taken_over(directory, begun_as)) is not None:
            return connection
        package = str(Path(raytune_fsdp.__file__).parent)
        # By its file: with -m Python would import from the current directory, too. Not -P: forks would have it.
        program = str(Path(__file__).with_name("template.py"))
        command = [sys.executable, program, str(directory), package, threads, begun_as]
        with open(directory / LOG, "ab") as log:
            subprocess.run(
                command, env=env, start_new_session=True, check=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        return _connected(directory, time.monotonic() + _BEGINS_SECONDS)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _begun_as(env: Mapping[str, str]) -> str:
    """Return what differs between templates that are begun here with different outcomes, in short."""
    of = [of_process(env), ask.groups(), os.getcwd() if is_relative(env) else ""]
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


def _taken_over(directory: Path, begun_as: str) -> socket.socket | None:
    """Return the connection to the template that is there: a killed driver of this run has left it, or it is shared.

    None if there is none, or none that would serve this driver: that one ends once its last forks have, and its last
    driver. Raises TimeoutError if these do not end.
    """
    until = time.monotonic() + _BEGINS_SECONDS
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        answer = b""
        with suppress(OSError):  # nobody is there, or it still imports
            connection.settimeout(_BEGINS_SECONDS)
            connection.connect(str(directory / SOCKET))
            send(connection, {"begun_as": begun_as})
            answer = connection.recv(16)
            connection.settimeout(None)
        if answer == KEPT:
            return connection
        connection.close()
        if answer != LATER:
            return None
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError  # no template, then: to ask for this one would keep it


def _connected(directory: Path, until: float) -> socket.socket | None:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(directory / SOCKET))
            send(connection, {})
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > until:
                return None
        time.sleep(_LOOK_SECONDS)


def release(connection: socket.socket) -> None:
    """End the template at the other end of this connection, unless another driver has it, too."""
    with suppress(OSError):
        connection.sendall(b"end")
        connection.close()
