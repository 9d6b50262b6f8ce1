"""Signals to the driver of a run on Ray."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from raytune_fsdp.errors import Interrupted
from raytune_fsdp.launch import signals
from raytune_fsdp.launch.signals import Signals


def send(kind: signal.Signals) -> None:
    os.kill(os.getpid(), kind)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_no_library_takes_a_stop_for_an_error_of_its_own(kind: signal.Signals) -> None:
    before = signal.getsignal(kind)
    passed = []
    with pytest.raises(Interrupted, match=f"stopped by {kind.name} before training began"), Signals():
        with contextlib.suppress(Exception):
            send(kind)
        passed.append(1)
    assert not passed and signal.getsignal(kind) is before


def test_once_held_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Signals() as held:
        held.hold()
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # to the process, and to its group
        assert held.count == 1
        monkeypatch.setattr(signals, "_TOGETHER_SECONDS", 0.0)
        send(signal.SIGINT)
        assert held.count == 2
