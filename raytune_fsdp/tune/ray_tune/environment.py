"""The environment of the process that drives the runs of a trial: that with which Ray began the trial's own process, as
a program of a job on the same cluster has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raytune_fsdp.base.errors import JOB_CONFIG
from raytune_fsdp.launch.environment import with_package
from raytune_fsdp.launch.notices import JOB_STOP, STOP_SECONDS

_OF_WORKERS = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Variables that Ray gives a worker, and that are not another driver's."""


def environment_of_driver(
    began: Mapping[str, str], *, seconds: float, address: str | None, runtime_env: Mapping[str, Any]
) -> dict[str, str]:
    """Return the environment of the driver. `began`: that of the trial's process, when it began.

    `seconds`: how long a stop leaves it. `address`: of the cluster; None: there is none. `runtime_env`: what Ray has
    given the trial's process, its variables included, which ranks are to have, too: they are workers of another job.
    """
    env = with_package({name: value for name, value in began.items() if name not in _OF_WORKERS})
    env[STOP_SECONDS] = f"{seconds:g}"
    if address is not None:
        env["RAY_ADDRESS"] = address
        if runtime_env:
            env[JOB_CONFIG] = json.dumps({"runtime_env": dict(runtime_env), "metadata": {}})
            env[JOB_STOP] = env[STOP_SECONDS]  # it is no job that `ray job stop` ends, in the 3 s of its default
    return env
