"""Notices of the clouds, from a server that answers as their metadata services do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray.board import Line
from raytune_fsdp.launch.ray.nodes import node_watch, spot
from raytune_fsdp.launch.ray.nodes.spot import ENDPOINT, seconds_left
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


def answer(text: str) -> bytes:
    return f"HTTP/1.0 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


FAR_DAY = '{"Events": [{"EventType": "Preempt", "Resources": ["worker-7"], "NotBefore": "31 Dec 9999 23:59:59 -0100"}]}'
NO_HTTP = b"\0\1\2\r\n\r\n"
NONSENSE = [
    NO_HTTP,
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",  # half an answer
    answer("[" * 60_000),
    answer('{"Events": 7}'),
    *[answer(FAR_DAY), answer("worker-7")],
]


class Board:
    def __init__(self) -> None:
        self.said: list[str] = []

    def tell(self, line: Line) -> None:
        self.said.append(line.text)


def test_a_notice_is_acted_on_whatever_was_answered_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever Ray answers first: the drain is asked for until it is accepted, and both are said once."""
    monkeypatch.setattr(node_watch, "_ASK_SECONDS", 0.01)
    server.announce(120)
    ends: list[float] = []

    def drain(ends_at: float) -> None:
        ends.append(ends_at)
        if len(ends) < 4:
            server.nonsense.append(NO_HTTP)  # a notice once seen stands
            raise RuntimeError("GCS is not there")

    server.nonsense += NONSENSE
    board: Any = Board()
    node_watch._watch("azure", board, drain)
    assert not server.nonsense and len(ends) == 4
    assert all(115 < each - time.time() <= 120 for each in ends)
    silent, drains = board.said
    assert silent.startswith("cluster.spot_notice=azure: the metadata service does not answer")
    assert "cannot be drained yet (RuntimeError: GCS is not there)" in drains
