"""Variables that are set for libraries do not outlive the call."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.launcher.api import LaunchConfig

from raytune_fsdp.launch import local
from raytune_fsdp.launch.environment import environment


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


def test_ranks_of_this_machine_meet_at_an_address_that_every_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its name, which may not resolve, or lead to a VPN: they would wait there until they give up."""
    met = []

    def instead(launch: LaunchConfig, entrypoint: Any) -> Callable[..., None]:
        return lambda file: met.append(RendezvousStoreInfo.build(0, HashStore(), launch.local_addr, 1).master_addr)

    monkeypatch.setattr(socket, "getfqdn", lambda name="": "nowhere.invalid")
    monkeypatch.setattr(local, "elastic_launch", instead)
    local.start_ranks(print, (), 2, name="eval")
    assert met == ["127.0.0.1"]
