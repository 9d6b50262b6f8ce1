"""Ask a cloud's metadata service whether, and when, this machine will be taken away.

Clouds announce that two minutes (AWS) or half a minute (Google, Azure) ahead, at an address that only the machine
itself can ask. Ray does not ask there.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from raytune_fsdp.config.sections.cluster import SPOT_NOTICE_SECONDS

ENDPOINT = "RAYTUNE_METADATA_ENDPOINT"
"""Environment variable with another address of the service: http://host:port"""

_TIMEOUT_SECONDS = 2.0
_MOST_BYTES = 1 << 16
_TOKEN_SECONDS = 21_600
_GOOGLE_SECONDS = SPOT_NOTICE_SECONDS["gcp"] - 5.0  # some have passed when the notice is read
_UNKNOWN_SECONDS = 30.0  # where the service names no time

# These addresses are the machine's own: a proxy would ask for another machine, or for none.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def seconds_left(cloud: str) -> float | None:
    """Return how many seconds this machine still has; None if it is not about to be taken away.

    Raise anything if the service does not answer as it should.
    """
    return _CLOUDS[cloud]()


def _aws() -> float | None:
    base = _base("http://169.254.169.254")
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
    token = _ask(f"{base}/latest/api/token", lifetime, method="PUT").decode()
    try:
        text = _ask(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code == 404:  # there is no notice
            return None
        raise
    return _until(datetime.fromisoformat(str(_map(text)["time"])))


def _gcp() -> float | None:
    url = f"{_base('http://metadata.google.internal')}/computeMetadata/v1/instance/preempted"
    answer = _ask(url, {"Metadata-Flavor": "Google"})
    return _GOOGLE_SECONDS if answer.strip() == b"TRUE" else None


def _azure() -> float | None:
    base, header = _base("http://169.254.169.254"), {"Metadata": "true"}
    events = _map(_ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", header)).get("Events", [])
    preempted = [each for each in events if each.get("EventType") == "Preempt"]
    if not preempted:
        return None
    # The answer is about a whole group of machines.
    name = _ask(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header).decode()
    times = [each.get("NotBefore") for each in preempted if name in each.get("Resources", [])]
    return min((_until(parsedate_to_datetime(time)) if time else _UNKNOWN_SECONDS for time in times), default=None)


_CLOUDS: dict[str, Callable[[], float | None]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}


def _base(default: str) -> str:
    return os.environ.get(ENDPOINT, default).rstrip("/")


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> bytes:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    with _direct.open(request, timeout=_TIMEOUT_SECONDS) as answer:
        return bytes(answer.read(_MOST_BYTES))


def _map(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the metadata service has not answered with a map")
    return found


def _until(time: datetime) -> float:
    return max(0.0, (time.astimezone(UTC) - datetime.now(UTC)).total_seconds())
