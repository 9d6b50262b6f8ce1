"""Signals to the process that a person stops."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from raytune_fsdp.errors import Interrupted
from raytune_fsdp.launch import signals
from raytune_fsdp.launch.signals import Signals, StopFlag
from raytune_fsdp.types import StopReason


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


def test_a_rank_stops_at_once_until_it_trains_and_with_a_checkpoint_then(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    passed = []
    with pytest.raises(Interrupted, match="stopped by SIGTERM before the first step"), StopFlag():
        send(signal.SIGTERM)
        passed.append(1)
    assert not passed and signal.getsignal(signal.SIGTERM) is before
    with StopFlag(insist=False) as stop:
        assert stop() is None, "training asks before its first step"
        send(signal.SIGTERM)
        assert stop() is StopReason.SIGNAL
    with StopFlag() as stop:
        stop()
        send(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a second one ends the process"
        assert stop() is StopReason.SIGNAL


def test_outside_of_the_main_thread_nothing_is_touched() -> None:
    before = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    inside = []

    def work() -> None:
        with Signals() as held, StopFlag() as stop:
            held.take()
            inside.append([signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)])
            assert stop() is None

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]
