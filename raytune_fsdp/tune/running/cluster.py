"""The Ray of a sweep's trials: the cluster that each of them finds, or one that is started for all of them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.base.untrusted import MIB
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.environment import SHARED, with_package

_BESIDE_SECONDS = 120.0
"""How long the process that starts Ray may take besides, for its imports."""
_CLOSE_SECONDS = 30.0
_OMP = "OMP_NUM_THREADS"


class TrialsRay:
    """What the processes of trials need to join a Ray."""

    def __init__(self, process: subprocess.Popen[bytes] | None, told: Mapping[str, Any]) -> None:
        self._process = process
        self.variables: dict[str, str] = dict(told.get("variables", {}))
        """Variables of their environment."""
        self.about: str | None = told.get("about")
        """The Ray that was started for them; None: none was."""

    def used_by(self, pid: int) -> None:
        """Tell whoever holds the Ray of a process that uses it, and may end after this one."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has died, and its Ray with it: the trials say so
                self._process.stdin.write(f"{pid}\n".encode())
                self._process.stdin.flush()


def threads_for(config: FinetuneConfig, trials: int) -> int | None:
    """Return how many threads each rank gets where so many trials share this machine without Ray. None: the user has
    said it, a trial has the machine for itself, or Ray shares it out."""
    if not without_ray(config) or trials == 1 or _OMP in os.environ:
        return None
    # Each would take all cores, and wait for the others at every product. Ray does the same for its workers.
    return max(1, (os.cpu_count() or 1) // (trials * (config.cluster.most or 1)))


def without_ray(config: FinetuneConfig) -> bool:
    launch = config.cluster.launch
    return launch == "local" or (launch == "auto" and find_spec("ray") is None)


@contextmanager
def ray_for(configs: Sequence[FinetuneConfig], trials: int, threads: int | None, shared: Path) -> Iterator[TrialsRay]:
    """Start or find a Ray that has room for so many trials at a time. `configs`: those of the trials that are known.
    `threads`: of each rank, without Ray; None: not said here. `shared`: names the processes that their workers are
    forked from."""
    if without_ray(configs[0]):
        yield TrialsRay(None, {"variables": {} if threads is None else {_OMP: str(threads)}})
        return
    cluster = max((each.cluster for each in configs), key=lambda each: (each.most or 1) * each.cpus_per_worker)
    asked = {
        "workers": trials * (cluster.most or 1), "cpus_per_worker": cluster.cpus_per_worker,
        "device": cluster.device, "start_seconds": cluster.start_seconds,
        # cluster.env may hold secrets, and everybody can read a command line: with it, a trial begins the template.
        "fork_workers": cluster.fork_workers and not cluster.env,
    }  # fmt: skip
    variables = {SHARED: str(shared)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "raytune_fsdp.launch.ray.held", json.dumps(asked)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=with_package({**os.environ, **variables}),
        start_new_session=True,  # so that Ctrl-C does not end the Ray before its trials
    )  # fmt: skip
    try:
        told = _told(process, cluster.start_seconds + _BESIDE_SECONDS)
        yield TrialsRay(process, {**told, "variables": {**told.get("variables", {}), **variables}})
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _told(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    """Return what the process says of its Ray. Raises TrainingError if there is none."""
    assert process.stdout is not None
    file, said, deadline = process.stdout.fileno(), b"", time.monotonic() + seconds
    while not said.endswith(b"\n") and len(said) < MIB and time.monotonic() < deadline:
        if select.select([file], [], [], 1.0)[0]:
            if not (piece := os.read(file, 1 << 16)):
                break
            said += piece
    with suppress(ValueError):
        told = json.loads(said.strip().splitlines()[-1] if said.strip() else b"")
        if isinstance(told, dict) and "error" not in told:
            return told
        raise TrainingError(f"{told['error']}" if isinstance(told, dict) else "Ray could not be started")
    raise TrainingError("the process that starts Ray for the trials has ended; cluster.launch=local does without Ray")
