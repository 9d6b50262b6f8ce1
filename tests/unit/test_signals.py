"""Signals to the process that a person stops."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted
from raytune_fsdp.launch import signals
from raytune_fsdp.launch.signals import Signals, StopFlag


def send(kind: signal.Signals) -> None:
    os.kill(os.getpid(), kind)


def lose(kind: signal.Signals) -> None:
    """Send it where Python drops what is raised."""

    class Thing:
        pass

    thing = Thing()
    kept = weakref.ref(thing, lambda _: send(kind))
    del thing
    assert kept() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_drops_is_not_lost() -> None:
    with pytest.raises(Interrupted, match="stopped by SIGTERM before training began"), Signals():
        lose(signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped by SIGTERM before"), Signals():
        lose(signal.SIGTERM)
        with Signals("during another block"):
            raise AssertionError("this block begins although the run was to stop")
    with pytest.raises(Interrupted, match="stopped by SIGINT before"), Signals() as signals:
        lose(signal.SIGINT)
        signals.hold()
        raise AssertionError("training would begin")
    with StopFlag(insist=False) as stop:
        lose(signal.SIGTERM)
        assert stop() is StopReason.SIGNAL, "training ends after its first step, with a checkpoint"
    with Signals():
        pass  # nothing is left over


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_no_library_takes_a_stop_for_an_error_of_its_own(kind: signal.Signals) -> None:
    before = signal.getsignal(kind)
    passed = []
    with pytest.raises(Interrupted, match=f"stopped by {kind.name} before training began"), Signals():
        with contextlib.suppress(Exception):
            send(kind)
        passed.append(1)
    assert not passed and signal.getsignal(kind) is before


def test_a_stop_that_becomes_another_error_is_a_stop() -> None:
    """As the start of a module in C++ makes an ImportError of whatever is raised in it."""
    with pytest.raises(Interrupted, match="stopped by SIGINT before training began"), Signals():
        try:
            send(signal.SIGINT)
        except BaseException:
            raise ImportError("initialization failed") from None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_came_of_a_stop_and_what_says_more_than_it_are_kept() -> None:
    with pytest.raises(Interrupted) as stopped, Signals():
        lose(signal.SIGTERM)
        raise OSError("the disk is full")
    assert isinstance(stopped.value.__cause__, OSError), "a person has to see it"
    with pytest.raises(Interrupted, match="after step 7"), Signals():
        lose(signal.SIGTERM)
        raise Interrupted("stopped by a signal after step 7")
    with Signals():
        pass


def test_a_stop_at_the_end_of_the_context_ends_it_with_all_handlers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, put_back = signal.getsignal(signal.SIGINT), signal.signal
    with pytest.raises(Interrupted, match="stopped by a signal before training began"), Signals():

        def late(kind: int, handler: object) -> object:
            monkeypatch.setattr(signal, "signal", put_back)
            send(signal.SIGINT)
            return put_back(kind, handler)  # type: ignore[arg-type]

        monkeypatch.setattr(signal, "signal", late)
    assert signal.getsignal(signal.SIGINT) is before


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
        assert stop() is StopReason.SIGNAL


STOPPED = """
import signal, sys, time
from raytune_fsdp.launch.signals import StopFlag

with StopFlag() as stop:
    stop()
    print("training", flush=True)
    while stop() is None:
        time.sleep(0.01)
    print("stopping", flush=True)
    time.sleep(20 if sys.argv[1:] else 0.5)
signal.signal(signal.SIGINT, lambda *_: print("the caller's handler", flush=True))
signal.raise_signal(signal.SIGINT)
time.sleep(1.2)
signal.raise_signal(signal.SIGINT)
"""


def test_a_second_stop_ends_a_rank_and_the_first_one_sent_twice_does_not() -> None:
    """A rank may hang where Python handles no signal, and a terminal and a scheduler may both send the first one."""
    command = [sys.executable, "-c", STOPPED]
    ends = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # beside the other: both wait for seconds
    with subprocess.Popen([*command, "hangs"], stdout=subprocess.PIPE, text=True) as process:
        assert ends.stdout is not None and ends.stdout.readline() == "training\n"
        ends.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)  # a scheduler, and then a person
        assert process.stdout.readline() == "stopping\n"
        for kind in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(kind)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(signals._TOGETHER_SECONDS + 0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT
    out, _ = ends.communicate(timeout=20)
    assert out == "stopping\n" + "the caller's handler\n" * 2 and ends.returncode == 0


END_OF_A_RANK = """
import os, signal, threading, time
from raytune_fsdp.launch.signals import StopFlag, hear_no_ctrl_c, listening

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as deaf_children has done before this process began
stop = StopFlag(insist=False)
hear_no_ctrl_c()
with stop, listening():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # as libraries do: it receives all signals
    stop()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    print(stop(), flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
print("the end", flush=True)
"""


def test_ctrl_c_that_is_passed_on_while_a_rank_ends_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", END_OF_A_RANK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{StopReason.SIGNAL}\nthe end\n", "")


def test_a_stop_after_the_last_step_does_not_begin_an_export() -> None:
    with StopFlag(insist=False) as stop:
        stop()
        stop.check_export(at_end=True)
        send(signal.SIGTERM)
        stop.check_export(at_end=False)
        with pytest.raises(Interrupted, match="the run is complete, but its export is not; the same command makes it"):
            stop.check_export(at_end=True)


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


ASKED = """
import os, signal, sys
from types import SimpleNamespace
config = SimpleNamespace(cluster=SimpleNamespace(device="cpu"))
def ask(*_):
    os.kill(os.getpid(), signal.SIGUSR1)
    raise EOFError
def begin(rank, *given):
    try:
        rank(*given)
    except EOFError:
        print("goes on", file=sys.stderr)
"""
LOCAL = """
from raytune_fsdp.launch import local
local.choose_device = ask
begin(local._alone, config, None, None, None, None)
begin(local._rank_main, config, None, None, None, None, None)
begin(local._run_rank, config)
"""
ON_RAY = """
from raytune_fsdp.launch.ray import rank
rank.ray.train.get_context = ask
begin(rank.train_rank, None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(LOCAL, 3), (ON_RAY, 1)], ids=["local", "Ray"])
def test_a_rank_answers_with_its_stacks_from_its_first_line_on(ranks: str, count: int) -> None:
    """By default the signal ends a process."""
    if ranks == ON_RAY:
        pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", ASKED + ranks], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" in ask") == done.stderr.count("goes on") == count


def test_a_caller_keeps_its_own_handler() -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with signals.stacks_at_signal():
            send(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard
