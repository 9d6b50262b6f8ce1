"""A head that is away, comes back, or is another cluster's, as a run sees it. No Ray is started."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.ray import private, session
from raytune_fsdp.launch.ray.watch import head as module
from raytune_fsdp.launch.ray.watch.head import Head
from tests.clock import Clock

LIMIT = 50.0
"""Ray's own, a minute, without what closing takes."""


class Port:
    """Where a head listens, or nobody does."""

    cluster = "ours"
    """Whose it is."""

    def __init__(self) -> None:
        self.server: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        self.number = self.server.getsockname()[1]

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.server = None

    def open(self) -> None:
        self.server = socket.create_server(("127.0.0.1", self.number))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "time", clock := Clock())
    monkeypatch.setattr(module, "_LOOK_SECONDS", 1e6)  # the tests look
    return clock


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    found = Port()
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    monkeypatch.setattr(private, "own_cluster", lambda: "ours", raising=False)
    monkeypatch.setattr(private, "cluster_at", lambda address: found.cluster, raising=False)
    yield found
    found.close()


def looks(head: Head, clock: Clock, seconds: int) -> list[bool]:
    found = []
    for _ in range(seconds):
        clock.now += 1
        found.append(head.answers())
    return found


def test_a_head_that_is_away_for_too_long_is_lost_and_one_that_comes_back_is_not(port: Port, clock: Clock) -> None:
    head = Head(f"127.0.0.1:{port.number}")
    assert looks(head, clock, 2) == [True, True]
    port.close()
    assert not any(looks(head, clock, 40)) and head.lost() is None
    port.open()
    assert looks(head, clock, 2) == [True, True]
    port.close()
    assert not any(looks(head, clock, 50)) and head.lost() is None, "counted anew"
    looks(head, clock, 1)
    assert head.lost() == f"the head of the Ray cluster at {head.address} has not answered for 50 s"


@pytest.mark.parametrize("was_seen", [True, False])
def test_a_head_that_comes_back_without_its_state_is_lost_at_once(port: Port, clock: Clock, was_seen: bool) -> None:
    """Ray would end this process at the next call, from C++. `was_seen`: that it was away; else this process was."""
    head = Head(f"127.0.0.1:{port.number}")
    assert looks(head, clock, 1) == [True]
    port.close()
    if was_seen:
        assert looks(head, clock, 1) == [False]
    port.cluster = "another"
    port.open()
    clock.now += 0 if was_seen else 30
    assert looks(head, clock, 1) == [False]
    assert head.lost() == (
        f"the head of the Ray cluster at {head.address} has come back without its state, as another cluster's"
    )
    port.cluster = "ours"
    assert looks(head, clock, 1) == [False] and head.lost() is not None


def test_a_head_that_does_not_say_whose_it_is_does_not_answer(
    port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections before it has read its state, and Ray waits for that."""
    head = Head(f"127.0.0.1:{port.number}")
    port.close()
    looks(head, clock, 1)
    port.open()
    asked: list[str] = []

    def refuses(address: str) -> str:
        asked.append(address)
        raise RuntimeError("not yet")

    def waits(address: str) -> str:
        asked.append(address)
        time.sleep(8)
        return "ours"

    monkeypatch.setattr(module, "_KNOCK_SECONDS", 0.1)
    for says in (refuses, waits):
        monkeypatch.setattr(private, "cluster_at", says)
        assert looks(head, clock, 3) == [False] * 3
    assert len(asked) == 3 + 1 and head.lost() is None, "it is asked once, until it answers"
    looks(head, clock, 45)
    assert head.lost() is not None


def test_a_driver_that_was_away_does_not_call_its_head_lost(
    port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One knock failed on a busy machine, then the driver was stopped: the head was there all the time."""
    head = Head(f"127.0.0.1:{port.number}")

    def too_slow(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    with monkeypatch.context() as busy:
        busy.setattr(socket, "create_connection", too_slow)
        looks(head, clock, 1)
    clock.now += 70
    assert head.lost() is None
    with monkeypatch.context() as busy:
        busy.setattr(socket, "create_connection", too_slow)
        looks(head, clock, 1)
    assert head.lost() is None, "the one knock after it says no more than the one before"
    assert looks(head, clock, 1) == [True]


@pytest.mark.parametrize("hangs", [False, True])
def test_names_that_are_away_make_no_head_lost(
    port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    head, resolve = Head(f"localhost:{port.number}"), socket.getaddrinfo

    def no_names(host: Any, *arguments: Any, **named: Any) -> Any:
        if host == "localhost":
            time.sleep(8 if hangs else 0)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return resolve(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", no_names)
    began = time.monotonic()
    assert all(looks(head, clock, 60)) and head.lost() is None
    port.close()
    assert not any(looks(head, clock, 3))
    port.open()
    assert looks(head, clock, 1) == [True]
    assert time.monotonic() - began < 5


def test_a_head_that_has_moved_is_found_by_its_name(port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the service of a head that Kubernetes has started again, on another machine."""
    names = {"head.svc": "127.0.0.1"}
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **named: resolve(names.get(host, host), *rest, **named)
    )
    head = Head(f"head.svc:{port.number}")
    assert looks(head, clock, 1) == [True]
    port.close()
    port.server = socket.create_server(("127.0.0.2", port.number))
    names["head.svc"] = "127.0.0.2"
    for _ in range(100):
        if looks(head, clock, 1) == [True]:
            break
        time.sleep(0.02)
    assert head.lost() is None and looks(head, clock, 1) == [True]


def test_a_connection_of_the_callers_is_watched_and_not_closed(
    port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a notebook, and of a trial of Ray Tune."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(session, "_size", lambda: "4 CPUs")
    context = SimpleNamespace(gcs_address=f"127.0.0.1:{port.number}")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("the Ray is the caller's"))
    joined = session.connect(ClusterConfig(), 2, None)
    assert joined.answers() and joined.lost() is None
    port.close()
    for _ in range(60):
        clock.now += 1
        assert not joined.answers()
    assert (joined.lost() or "").startswith(f"the head of the Ray cluster at {context.gcs_address} has not answered")
    joined.close()
    assert joined.head is not None and joined.head._closed.is_set()


@pytest.mark.parametrize("owned", [True, False])
def test_a_command_knows_when_ray_would_crash_it_at_its_end(
    port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch, owned: bool
) -> None:
    """Where another cluster has taken the place of the one that it has joined. A caller's Ray is the caller's."""
    monkeypatch.setattr(session, "crashing", crashing := list[str]())
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for other in (False, True):
        joined = session.Session("joined", owned=owned, head=Head(f"127.0.0.1:{port.number}"))
        assert joined.answers()
        clock.now += 30
        port.cluster = "another" if other else "ours"
        assert joined.answers() != other
        joined.close()
        assert bool(crashing) == (owned and other)
    crashing.clear()
    joined = session.Session("joined", owned=owned, head=Head(f"127.0.0.1:{port.number}"))
    monkeypatch.setattr(joined.head, "lost", lambda: "it has not answered for 50 s")
    joined.close()
    assert bool(crashing) == owned, "it would wait for the head"
