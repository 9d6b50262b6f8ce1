"""Checkpoints by rank 0's clock, on two ranks and storage that is slow: the planned ones are where they would be."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raytune_fsdp.base.errors import TransientError
from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from tests.quota import with_quota
from tests.ranks import run_ranks
from tests.runs import make_config, trajectory

ASKED = (7, 15)
"""Steps after which the clock asks, each right before a planned save."""
_WRITES_SECONDS = 0.7
_NEWNS, _PRIVATE = 0x20000, 0x4000 | 0x40000


def rank(values: Mapping[str, Any]) -> None:
    """A rank of a run in which half an hour passes in two of the steps, and a recovery point takes long to write."""
    from raytune_fsdp.checkpoint import by_clock
    from raytune_fsdp.checkpoint import storage as posix
    from raytune_fsdp.launch.worker import work
    from tests.clock import Clock
    from tests.runs import prepare_on_rank0

    config, clock = FinetuneConfig.model_validate(values), Clock()
    by_clock.time = clock  # type: ignore[assignment]
    create = posix.PosixDraft.create

    @contextmanager
    def slowly(draft: posix.PosixDraft, file: str) -> Iterator[Any]:
        if ".r." in draft.staging.name and file.startswith("__"):
            time.sleep(_WRITES_SECONDS)
        with create(draft, file) as sink:
            yield sink

    posix.PosixDraft.create = slowly  # type: ignore[method-assign]
    prepared, standing = prepare_on_rank0(config)
    step = 0

    def stop() -> None:
        nonlocal step
        step += 1
        # Rank 1's clock is another one, and does not count.
        clock.now += 1801.0 if (step in ASKED) == (dist.get_rank() == 0) else 0.0

    work(config, prepared, standing, torch.device("cpu"), stop)


def on_small_disk(values: Mapping[str, Any], asked: Sequence[int], size: int, left: int) -> list[tuple[str, Any]]:
    """The only rank of a run whose checkpoints have a disk of their own, which something fills up to some bytes after
    step 6."""
    from raytune_fsdp.checkpoint import by_clock
    from raytune_fsdp.launch.worker import work
    from tests.clock import Clock
    from tests.runs import prepare_on_rank0

    config, clock, step = FinetuneConfig.model_validate(values), Clock(), 0
    by_clock.time = clock  # type: ignore[assignment]
    libc, home = ctypes.CDLL(None, use_errno=True), str(config.checkpoint.storage)
    assert libc.unshare(_NEWNS) == 0 and libc.mount(None, b"/", None, _PRIVATE, None) == 0
    assert libc.mount(b"disk", home.encode(), b"tmpfs", 0, f"size={size}".encode()) == 0, ctypes.get_errno()

    def stop() -> None:
        nonlocal step
        step += 1
        clock.now += 1801.0 if step in asked else 0.0
        if step == 6:
            free = shutil.disk_usage(home).free
            (Path(home) / "somebody-else").write_bytes(b"0" * (free - left))

    with suppress(TransientError):
        work(config, *prepare_on_rank0(config), torch.device("cpu"), stop)
    place = RunDir.of(config)
    return [*outcomes(place), ("there", [each.name for each in committed(place.checkpoints)])]


def outcomes(place: RunDir) -> list[tuple[str, Any]]:
    """What has become of saves, and what was removed for them."""
    events = [each for each in read_events(place.events) if each["event"] in ("saved", "save_failed", "room_made")]
    return [(each["event"], each["fields"].get("step", each["fields"].get("removed"))) for each in events]


def _may_mount() -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(_NEWNS) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("asked", "made", "left"),
    [
        ((3, 5), [("room_made", "step-00000003.a1.r"), ("saved", 9)], "step-00000009.a1"),
        ((3,), [], "step-00000003.a1.r"),
    ],
)
def test_the_last_save_takes_the_room_of_a_recovery_point_on_a_full_disk_but_not_of_the_only_one(
    tmp_path: Path, asked: Sequence[int], made: list[Any], left: str
) -> None:
    if not _may_mount():
        pytest.skip("only root may give a process a disk of its own")
    (tmp_path / "disk").mkdir()
    config = make_config(
        tmp_path, train={"global_batch": 4, "max_steps": 9}, parallel={"precision": "fp32"},
        checkpoint={"storage": str(tmp_path / "disk"), "asynchronous": False},
    )  # fmt: skip
    (found,) = run_ranks(on_small_disk, 1, config.model_dump(), asked, 2_000_000, 100_000)
    assert found == [*(("saved", step) for step in asked), ("save_failed", 9), *made, ("there", [left])]


def within_quota(values: Mapping[str, Any]) -> None:
    """A rank of a run with a quota for two checkpoints, in which the clock asks for two."""
    from raytune_fsdp.checkpoint import by_clock
    from raytune_fsdp.checkpoint import storage as posix
    from raytune_fsdp.launch.worker import work
    from tests.clock import Clock
    from tests.runs import prepare_on_rank0

    config, clock, step = FinetuneConfig.model_validate(values), Clock(), 0
    by_clock.time = clock  # type: ignore[assignment]
    posix.PosixDraft.create = with_quota(lambda: 2.4)  # type: ignore[method-assign,assignment]

    def stop() -> None:
        nonlocal step
        step += 1
        clock.now += 1801.0 if step in ASKED else 0.0

    work(config, *prepare_on_rank0(config), torch.device("cpu"), stop)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_ranks_write_a_planned_save_again_when_room_is_made_for_it(tmp_path: Path, asynchronous: bool) -> None:
    """Of the state after its step, although training may have gone on."""
    held_out = {"data": {"eval": [{"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}]}}
    sections: dict[str, Any] = {
        "train": {"global_batch": 8, "micro_batch": 2, "max_steps": 20},
        "parallel": {"precision": "fp32"}, "eval": {"every": 16}, **held_out,
    }  # fmt: skip
    plain = trajectory(make_config(tmp_path, run={"name": "plain"}, **sections), 2)
    config = make_config(tmp_path, **sections, checkpoint={"asynchronous": asynchronous, "keep_best": 1})
    place = RunDir.of(config)
    run_ranks(within_quota, 2, config.model_dump())
    assert outcomes(place) == [
        ("saved", 7), ("saved", 15), ("save_failed", 16), ("room_made", "step-00000007.a1.r"), ("saved", 16),
        ("saved", 20),
    ]  # fmt: skip
    assert [each.name for each in committed(place.checkpoints)] == ["step-00000016.a1", "step-00000020.a1"]
    assert read_trajectory(place.metrics) == plain


def test_planned_saves_are_where_they_would_be(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"global_batch": 8, "micro_batch": 2, "max_steps": 16},
        "parallel": {"precision": "fp32"},
    }
    plain = trajectory(make_config(tmp_path, run={"name": "plain"}, **sections), 2)
    config = make_config(
        tmp_path, **sections, checkpoint={"every": {"minutes": 30}, "keep_best": 1}, eval={"every": 8},
    )  # fmt: skip
    held_out = {**config.data.model_dump(), "eval": config.data.model_dump()["train"]}
    values = {**config.model_dump(), "data": held_out}
    place = RunDir.of(config)
    run_ranks(rank, 2, values)
    events = [each for each in read_events(place.events) if each["event"] in (names.SAVED, names.SAVE_POSTPONED)]
    assert [(each["event"], each["fields"]["step"], each["fields"].get("recovery", False)) for each in events] == [
        ("saved", 7, True),
        ("saved", 8, False),
        ("saved", 15, True),
        ("saved", 16, False),
    ]
    assert [(each.step, each.lasting) for each in committed(place.checkpoints)] == [(8, True), (16, True)]
    assert read_trajectory(place.metrics) == plain
