"""Checkpoints by rank 0's clock, on two ranks and storage that is slow: the planned ones are where they would be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.jsonl import read_events, read_trajectory
from tests.ranks import run_ranks
from tests.runs import make_config, trajectory

ASKED = (7, 15)
"""Steps after which the clock asks, each right before a planned save."""
_WRITES_SECONDS = 0.7


def rank(values: Mapping[str, Any]) -> None:
    """A rank of a run in which half an hour passes in two of the steps, and a recovery point takes long to write."""
    from raytune_fsdp.checkpoint import by_clock, posix
    from raytune_fsdp.launch.local import prepare_on_rank0
    from raytune_fsdp.launch.worker import work
    from tests.clock import Clock

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
