"""Ranks of tests that take one call after another: each call finds what it would find in processes of its own."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.ranks import resident_ranks, run_ranks


@pytest.fixture(autouse=True)
def new_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of the tests before may have grown, or be about to have had their last call."""
    pool = ranks._Pool()
    monkeypatch.setattr(ranks, "_POOL", pool)
    yield
    pool.end()


def state() -> tuple[Any, ...]:
    import numpy
    import torch
    import torch.distributed as dist

    return (
        os.environ.get("LEFT_BEHIND"), os.getcwd(), numpy.random.rand(), torch.rand(1).item(),
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
        torch.get_num_threads(), dist.get_world_size(),
    )  # fmt: skip


def disturb() -> int:
    import numpy
    import torch
    import torch.distributed as dist

    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    numpy.random.seed(1)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    dist.barrier()  # the other rank has connected, too
    dist.destroy_process_group()
    return os.getpid()


def process() -> int:
    return os.getpid()


def summed_in_a_mesh() -> float:
    """Over two of four ranks, or over two: meshes of one shape, and other groups."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "parts"))["parts"] if world > 2 else None
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (world,), mesh_dim_names=("parts",))
    tensor = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    return float((tensor * 2).sum().full_tensor())


def fail(rank: int, how: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        if how == "raise":
            raise ArithmeticError("one of the ranks cannot")
        if how == "die":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    dist.barrier()


def refuse() -> None:
    raise ArithmeticError("nobody can")


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def test_a_call_finds_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_CALLS", 10**6)  # other tests have had calls of them
    monkeypatch.setattr(ranks, "MOST_BYTES", 1 << 40)
    fresh = run_ranks(state, 2)
    assert resident_ranks(state, 2) == fresh
    ids = resident_ranks(disturb, 2)
    assert resident_ranks(process, 2) == ids, "they are the same processes"
    assert resident_ranks(state, 2) == fresh


def store_of_the_call() -> str:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.FileStore)
    return store.path


def test_the_store_of_a_call_has_its_directory_after_it() -> None:
    """A rank that destroys its store then, without one, tried for 300 s: a failure of CI."""
    ranks._POOL.end()  # so that both calls have the ranks of this test
    first, second = (Path(resident_ranks(store_of_the_call, 1)[0]) for _ in range(2))
    assert first != second and first.parent == second.parent
    assert first.parent.is_dir()
    ranks._POOL.end()
    assert not first.parent.exists()


def test_meshes_of_one_shape_have_groups_of_their_own_in_each_call() -> None:
    for world in (2, 4, 2, 4):
        assert resident_ranks(summed_in_a_mesh, world) == [30.0] * world


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("raise", AssertionError, "rank 1 of 2 failed:\n(.|\n)*def fail|ArithmeticError: one of the ranks cannot"),
        ("die", AssertionError, "rank 1 died without a word: SIGSEGV|rank 0 of 2 failed:\n(.|\n)*[Cc]onnection"),
        ("hang", TimeoutError, r"ranks \[0, 1\] have not ended after 1 s"),
    ],
)
def test_a_rank_that_fails_fails_the_call_and_none_of_its_group_is_used_again(
    how: str, error: type[Exception], said: str
) -> None:
    before = resident_ranks(process, 2)
    with pytest.raises(error, match=said):
        resident_ranks(fail, 2, 1, how, seconds=1 if how == "hang" else 60)
    assert not set(before) & set(resident_ranks(process, 2))


def test_ranks_that_all_raise_are_used_again() -> None:
    """Each says so by itself, so none waits for another one."""
    before = resident_ranks(process, 2)
    with pytest.raises(AssertionError, match="rank [01] of 2 failed:\n(.|\n)*ArithmeticError"):
        resident_ranks(refuse, 2)
    assert resident_ranks(process, 2) == before
    assert resident_ranks(summed_in_a_mesh, 2) == [30.0] * 2


@pytest.mark.slow
def test_ranks_are_replaced_after_many_calls_and_where_one_leaves_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_SETTLE_SECONDS", 0.1)
    first = resident_ranks(process, 1)
    assert resident_ranks(process, 1) == first
    resident_ranks(leave_a_thread, 1)
    second = resident_ranks(process, 1)
    assert second != first
    monkeypatch.setattr(ranks, "MOST_CALLS", 1)
    assert resident_ranks(process, 1) != second


def test_a_rank_that_was_killed_between_two_calls_is_replaced() -> None:
    before = resident_ranks(process, 2)
    os.kill(before[1], signal.SIGKILL)
    ranks._POOL._ranks[1].process.join(30)
    assert not set(before) & set(resident_ranks(process, 2))


def test_while_a_thread_has_them_others_get_ranks_of_their_own(tmp_path: Path) -> None:
    thread = threading.Thread(target=resident_ranks, args=(wait_for, 1, tmp_path / "go"))
    thread.start()
    wait_for_lock = time.monotonic() + 60
    while not ranks._POOL.lock.locked() and time.monotonic() < wait_for_lock:
        time.sleep(0.01)
    assert len(resident_ranks(process, 1)) == 1 and thread.is_alive()
    (tmp_path / "go").touch()
    thread.join(60)
    assert not thread.is_alive()
