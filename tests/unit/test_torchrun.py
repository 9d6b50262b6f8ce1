"""How torchrun's ranks meet, of which any may be started again without the others. No process group is made."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Timer

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from raytune_fsdp.base.errors import Interrupted, TrainingError
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.launch import local, torchrun
from raytune_fsdp.launch.signals import StopFlag
from raytune_fsdp.launch.torchrun import Meeting

WORLD = 3
SOON = 10.0 / 60


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_LOOK_SECONDS", 0.005)
    monkeypatch.setattr(local, "_SIGN_SECONDS", 0.01)


@pytest.fixture
def store() -> Callable[[], Store]:
    """Each rank's own connection to the store that the first node's torchrun keeps."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    return lambda: TCPStore("127.0.0.1", kept.port, is_master=False, timeout=timedelta(seconds=30))


def begun(store: Store, rank: int) -> Future[Meeting]:
    """Let a rank begin, as `meet` does under torchrun."""
    if rank == 0:
        return in_thread(lambda: torchrun._call(store, WORLD, SOON), "rank 0")
    return in_thread(lambda: torchrun._come(store, rank, WORLD, SOON), f"rank {rank}")


def waiting(store: Store, meeting: Meeting) -> Future[str]:
    """Let a rank that has met wait for rank 0, and meet again if it has to. Returns where it joins."""

    def wait() -> str:
        at = meeting
        while not local._wait_for_rank0(at, SOON):
            at = torchrun._come(store, at.rank, WORLD, SOON)
        return at.name

    return in_thread(wait, f"rank {meeting.rank}")


def test_rank_0_that_is_started_again_alone_meets_the_others(store: Callable[[], Store]) -> None:
    """torchrun's static rendezvous starts only the ranks of its own node again. Twice."""
    stores = [store() for _ in range(WORLD)]
    first = [begun(each, rank) for rank, each in enumerate(stores)]
    met = [each.result(10) for each in first]
    assert len({each.name for each in met}) == 1
    others = [waiting(each, meeting) for each, meeting in zip(stores[1:], met[1:], strict=True)]
    for _ in range(2):  # it has died while it prepared
        again = begun(store(), 0).result(10)
    assert not any(each.done() for each in others)
    with local._waited_for(again):
        pass
    assert [each.result(10) for each in others] == [again.name] * 2


@pytest.mark.parametrize("prepares", [False, True])
def test_a_rank_that_is_started_again_alone_is_waited_for_and_counted_once(
    store: Callable[[], Store], prepares: bool
) -> None:
    """It has died before rank 0 had all answers, or while rank 0 prepared."""
    rank0 = begun(store(), 0)
    begun(store(), 1).result(10)
    again = [begun(store(), 1)]
    if not prepares:
        again[0].result(10)
        time.sleep(0.1)
        assert not rank0.done(), "it counts one rank twice, and goes on without another one"
    other = begun(store(), 2)
    meeting = rank0.result(10)
    with local._waited_for(meeting):
        if prepares:
            again.append(begun(store(), 1))
        assert {each.result(10).name for each in [*again, other]} == {meeting.name}


def test_what_earlier_ranks_have_left_is_not_taken_for_that_of_these(store: Callable[[], Store]) -> None:
    stores = [store() for _ in range(WORLD)]
    names = set()
    for _ in range(3):  # torchrun has started all again, or a process trains once more
        met = [begun(each, rank) for rank, each in reversed([*enumerate(stores)])]
        (name,) = {each.result(10).name for each in met}
        names.add(name)
        assert not any(each.result().is_over() for each in met)
    assert len(names) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_hears_signals(rank: int) -> None:
    (store := HashStore()).set_timeout(timedelta(seconds=8))
    timer = Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    with pytest.raises(Interrupted, match="stopped by SIGTERM before the first step"), StopFlag(insist=False):
        timer.start()
        if rank:
            torchrun._come(store, rank, WORLD, SOON)
        else:
            torchrun._call(store, WORLD, SOON)
    assert time.monotonic() - began < 5


def test_a_rank_says_who_has_not_come() -> None:
    with pytest.raises(TrainingError, match=r"rank 0 has ended, or has not come within .*_minutes=0.001"):
        torchrun._come(HashStore(), 1, WORLD, 0.001)
    with pytest.raises(TrainingError, match="2 of 3 ranks have not come within cluster.collective_minutes=0.001"):
        torchrun._call(HashStore(), WORLD, 0.001)
