"""Variables that are set for libraries do not outlive the call."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.launcher.api import LaunchConfig

from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.launch import local
from raytune_fsdp.launch.environment import environment
from raytune_fsdp.launch.torchrun import Meeting


def test_only_what_nobody_has_set_is_set_and_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTUNE_TEST_USERS", "theirs")
    monkeypatch.delenv("RAYTUNE_TEST_OURS", raising=False)
    before = dict(os.environ)
    with environment({"RAYTUNE_TEST_USERS": "ours", "RAYTUNE_TEST_OURS": "ours"}):
        assert (os.environ["RAYTUNE_TEST_USERS"], os.environ["RAYTUNE_TEST_OURS"]) == ("theirs", "ours")
    assert dict(os.environ) == before


def test_two_calls_at_once_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to end, as in another thread, leaves them to the other."""
    monkeypatch.delenv("RAYTUNE_TEST_OURS", raising=False)
    first, second = (environment({"RAYTUNE_TEST_OURS": "ours"}) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["RAYTUNE_TEST_OURS"] == "ours"
    second.__exit__(None, None, None)
    assert "RAYTUNE_TEST_OURS" not in os.environ


def test_ranks_wait_for_the_first_one_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun it prepares for all. To wait in the process group would end after cluster.collective_minutes."""
    monkeypatch.setattr(local, "_SIGN_SECONDS", 0.01)
    meeting, minutes = Meeting(HashStore(), 0, 2, "a"), 0.25 / 60
    joined = Event()
    other = Thread(target=lambda: local._wait_for_rank0(meeting, minutes) and joined.set(), daemon=True)
    other.start()
    with local._waited_for(meeting):
        assert not joined.wait(4 * 60 * minutes)
    assert joined.wait(10)
    with pytest.raises(TrainingError, match=r"no sign of life for cluster.collective_minutes=0.0001: .* data stats"):
        local._wait_for_rank0(Meeting(HashStore(), 1, 2, "a"), 0.0001)


def test_ranks_of_this_machine_meet_at_an_address_that_every_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its name, which may not resolve, or lead to a VPN: they would wait there until they give up."""
    met = []

    def instead(launch: LaunchConfig, entrypoint: Any) -> Callable[..., None]:
        return lambda file: met.append(RendezvousStoreInfo.build(0, HashStore(), launch.local_addr, 1).master_addr)

    monkeypatch.setattr(socket, "getfqdn", lambda name="": "nowhere.invalid")
    monkeypatch.setattr(local, "elastic_launch", instead)
    local.start_ranks(print, (), 2, name="eval")
    assert met == ["127.0.0.1"]
