"""Notices of the clouds, from a server that answers as their metadata services do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray import spot
from raytune_fsdp.launch.ray.spot import ENDPOINT, seconds_left
from tests.metadata import Server, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as found:
        monkeypatch.setenv(ENDPOINT, found.address)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # must not be asked
        yield found


@pytest.mark.parametrize(("cloud", "most"), [("aws", 120.0), ("azure", 120.0), ("gcp", 25.0)])
def test_a_notice(server: Server, cloud: str, most: float) -> None:
    assert seconds_left(cloud) is None
    server.announce(120)
    left = seconds_left(cloud)
    assert left is not None and most - 5 < left <= most
    server.announce(-20)
    left = seconds_left(cloud)
    assert left is not None and (left == 0.0 or cloud == "gcp")


def test_a_notice_for_another_machine(server: Server) -> None:
    server.announce(120)
    server.machines = ("worker-8",)
    assert seconds_left("azure") is None


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_no_service(monkeypatch: pytest.MonkeyPatch, cloud: str) -> None:
    monkeypatch.setattr(spot, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    with pytest.raises(OSError):
        seconds_left(cloud)
