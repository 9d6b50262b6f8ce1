"""Find out how much time a run has for a last checkpoint before something ends it, as far as this process can know."""

from __future__ import annotations

from collections.abc import Mapping

from raytune_fsdp.base.errors import JOB_CONFIG, ConfigError
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.config.sections.cluster import SPOT_NOTICE_SECONDS

STOP_SECONDS = "RAYTUNE_FSDP_STOP_SECONDS"
"""Environment variable: the seconds between a scheduler's signal and the end. Only the author of the scheduler's script
knows them."""

_IN_A_POD = "KUBERNETES_SERVICE_HOST"
JOB_STOP = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's variable: how long `ray job stop` waits."""
_JOB_STOP = (JOB_STOP, 3.0)
_DRAIN = ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30.0)
"""Ray's variables, with Ray's defaults (tests/unit/test_notices.py compares them with Ray)."""


def notices_of(cluster: ClusterConfig, environment: Mapping[str, str], *, ray: bool) -> dict[str, float]:
    """Return the seconds of notice, by what ends the run: `spot`, `job_stop`, `pod` or `scheduler`."""
    found = dict[str, float]()
    if ray and cluster.spot_notice != "none":
        found["spot"] = SPOT_NOTICE_SECONDS[cluster.spot_notice]
    if ray and JOB_CONFIG in environment:
        found["job_stop"] = seconds_in(environment, *_JOB_STOP)
    if STOP_SECONDS in environment:
        found["scheduler"] = seconds_in(environment, STOP_SECONDS, 0.0)
    elif ray and _IN_A_POD in environment:
        found["pod"] = seconds_in(environment, *_DRAIN)
    return found


def seconds_in(environment: Mapping[str, str], name: str, otherwise: float) -> float:
    """Return the seconds that a variable says. Raises ConfigError if it says something else."""
    text = environment.get(name, "")
    try:
        found = float(text or otherwise)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ConfigError(
            f"the environment variable {name}={text} is not a number of seconds: set it to one, or unset it"
        )
    return found
