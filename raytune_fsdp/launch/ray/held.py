"""A Ray for several commands on this machine, held by a process of its own until the last of them has ended.

    RAYTUNE_FSDP_FORKS=runs/rates python -m raytune_fsdp.launch.ray.held \\
        '{"workers": 4, "cpus_per_worker": 1, "device": "cpu", "start_seconds": 300}'

It prints a line of JSON: the variables with which other processes join that Ray, or none where they find a cluster by
themselves. On its input it is told, a line each, the ids of these processes. When the input ends, whoever asked for the
Ray has ended or was killed: the processes that still use it may commit a checkpoint before it goes.

With the Ray it holds the template that their workers are forked from, which RAYTUNE_FSDP_FORKS names here and there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import ray

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.environment import SHARED
from raytune_fsdp.launch.ray.forked.templates import Templates
from raytune_fsdp.launch.ray.session import connect, find_cluster

_MOST_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")


def main() -> int:
    for kind in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a command; this one ends after them
        signal.signal(kind, signal.SIG_IGN)
    config = ClusterConfig.model_validate(json.loads(sys.argv[1]))
    templates = Templates(config, Path(os.environ[SHARED]))
    try:
        return _hold(config, templates)
    finally:
        templates.end_here()  # last: until then it ends the forks of what is killed


def _hold(config: ClusterConfig, templates: Templates) -> int:
    assert config.most is not None, "the number of workers is known"
    try:
        if find_cluster() is not None:
            print(json.dumps({}), flush=True)
            return 0
        templates.begin_here()
        session = connect(config, config.most, None)
    except RaytuneError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    try:
        variables = {name: os.environ[name] for name in _TOKEN if name in os.environ}
        variables["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        print(json.dumps({"variables": variables, "about": session.about}), flush=True)
        users = [int(line) for line in sys.stdin if line.strip().isdecimal()]
        deadline = time.monotonic() + _MOST_SECONDS
        while any(psutil.pid_exists(user) for user in users) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
    finally:
        session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
