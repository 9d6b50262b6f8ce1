"""The stream through Ray Data is the local one, at every world size, from every step, on any number of CPUs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray

from raytune_fsdp.base.batch import Cursor, StepBatches
from raytune_fsdp.base.errors import RowError, TrainingError
from raytune_fsdp.data.batches import rank_batches
from raytune_fsdp.data.census import census
from raytune_fsdp.data.stream import Stream, StreamSample
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.launch.ray.tasks import calls
from raytune_fsdp.launch.ray.tasks.batches import ray_batches
from raytune_fsdp.launch.ray.tasks.stream import (
    FIRST_STEPS,
    build_on_ray,
    first_samples,
    split,
    stream_dataset,
    to_blocks,
)
from raytune_fsdp.plan.division import Division
from tests.mlflow_server import until
from tests.ray.conftest import CPUS
from tests.rows import make_windows, token_rows

SEED = 5
LENGTHS = [2 + (7 * i) % 15 for i in range(83)]


pytestmark = pytest.mark.usefixtures("cluster")


class UnevenStream(Stream):
    """Some windows take longer than those behind them, and the first process to build the third one dies of it."""

    def section(self, cursor: Cursor, number: int) -> Iterator[StreamSample]:
        if number == 2:
            try:
                (self.windows.cache.root / "died").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os._exit(1)
        time.sleep((0.1, 0.0, 0.05)[number % 3])
        return super().section(cursor, number)


def make(directory: Path, lengths: list[int] = LENGTHS, **options: Any) -> Windows:
    directory.mkdir(exist_ok=True)
    return make_windows([token_rows(directory, lengths)], cache=directory, seed=SEED, **options)


class Part(NamedTuple):
    """Some steps of a run."""

    division: Division
    steps: range

    @property
    def samples(self) -> int:
        return self.division.samples_of_steps(self.steps[0], self.steps[-1])


def divide(world: int, *, first: int = 1, last: int, total: int | None = None, blocks: int = 3, micro: int = 2) -> Part:
    division = Division(total_samples=total, global_batch=blocks * micro, micro_batch=micro, data_ranks=world)
    return Part(division, range(first, last + 1))


def shards_of(stream: Stream, cursor: Cursor, part: Part) -> list[Any]:
    dataset = stream_dataset(
        stream,
        cursor,
        micro_batch=part.division.micro_batch,
        samples=part.samples,
        first_block=part.division.first_micro_batch(part.steps[0]),
    )
    return split(dataset, part.division.data_ranks)


@ray.remote(num_cpus=0)
class Rank:
    def steps(
        self, shard: Any, windows: Windows, part: Part, rank: int, count: int | None = None, first: Any = None
    ) -> list[Any]:
        found = []
        batches = ray_batches(shard, windows, *part, data_rank=rank, first=first)
        for step in batches:
            found.append(seen(step))
            time.sleep(0.02 * (rank % 2))
            if len(found) == count:
                break
        batches.close()
        return found

    def failure(self, *arguments: Any) -> tuple[type, str, str]:
        try:
            self.steps(*arguments)
        except RowError as error:
            return type(error), str(error), error.reason
        raise AssertionError("no row was found to be bad")


@pytest.fixture(scope="module")
def ranks(cluster: None) -> list[Any]:
    return [Rank.remote() for _ in range(3)]


def seen(step: StepBatches) -> tuple[object, ...]:
    """All that a rank is given in a step. Not which windows were in the cache."""
    blocks = [
        (
            block.index, block.sample_ids, block.after, block.tokens, block.target_tokens, block.attended_pairs,
            block.input_ids.tolist(), block.labels.tolist(), block.position_ids.tolist(), block.source_ids.tolist(),
        )
        for block in step.micro_batches
    ]  # fmt: skip
    return step.step, blocks


def through_ray(ranks: list[Any], stream: Stream, cursor: Cursor, part: Part) -> list[list[Any]]:
    read, left, cursor = first_samples(stream, cursor, *part)
    assert left[-1] == part.steps[-1] and len(part.steps) - len(left) <= FIRST_STEPS
    shards = shards_of(stream, cursor, Part(part.division, left))
    running = [
        actor.steps.remote(shard, stream.windows, part, rank, first=read)
        for rank, (actor, shard) in enumerate(zip(ranks, shards, strict=False))
    ]
    result: list[list[Any]] = ray.get(running)
    return result


def locally(stream: Stream, cursor: Cursor, part: Part) -> list[list[Any]]:
    return [
        [seen(step) for step in rank_batches(stream, *part, cursor=cursor, data_rank=rank)]
        for rank in range(part.division.data_ranks)
    ]


def cursors(stream: Stream, last: int, **sizes: int) -> list[Cursor]:
    """The cursor in front of each step."""
    steps = rank_batches(stream, *divide(1, last=last, **sizes), cursor=Cursor(), data_rank=0)
    return [Cursor(), *(step.micro_batches[-1].after for step in steps)]


def samples_of(windows: Windows) -> list[int]:
    return [len(windows.get(0, k)[0].samples) for k in range(windows.count(0))]


@pytest.mark.slow  # in `make test`, a run on Ray is compared with one without (test_run.py)
@pytest.mark.parametrize(("world", "blocks", "micro"), [(1, 2, 8), (2, 3, 2), (3, 2, 3)])
def test_every_rank_gets_what_it_gets_without_ray(
    tmp_path: Path, ranks: list[Any], world: int, blocks: int, micro: int
) -> None:
    here, there = make(tmp_path / "here"), make(tmp_path / "there")
    samples = sum(samples_of(here))
    # More than two epochs; the last step has a block less, and its last block a sample less, where that leaves some.
    last = 5 * samples // 2 // (blocks * micro)
    total = last * blocks * micro - micro - (micro > 1)
    starts = cursors(Stream(here, seed=SEED), last, blocks=blocks, micro=micro)
    for first in (1, 1 + last // 3):
        part = divide(world, first=first, last=last, total=total, blocks=blocks, micro=micro)
        found = through_ray(ranks, UnevenStream(there, seed=SEED), starts[first - 1], part)
        assert found == locally(Stream(here, seed=SEED), starts[first - 1], part)
        assert sum(len(block[1]) for rank in found for _, own in rank for block in own) == part.samples
    assert (tmp_path / "there" / "died").exists()


@ray.remote
class Busy:
    """Holds CPUs."""

    def ready(self) -> bool:
        return True


@pytest.mark.slow
def test_empty_windows_and_a_single_cpu(tmp_path: Path, ranks: list[Any]) -> None:
    # Windows of two rows, most of which are too long: some windows have no sample.
    options: dict[str, Any] = {"window": 2, "long_documents": "drop"}
    lengths = [20 if i % 3 else 5 for i in range(40)]
    here, there = make(tmp_path / "here", lengths, **options), make(tmp_path / "there", lengths, **options)
    assert not all(samples_of(here))
    part = divide(2, last=3)
    busy = Busy.options(num_cpus=CPUS - 1).remote()
    assert ray.get(busy.ready.remote())
    found = through_ray(ranks, UnevenStream(there, seed=SEED), Cursor(), part)
    ray.kill(busy)
    assert found == locally(Stream(here, seed=SEED), Cursor(), part)


@pytest.mark.slow
def test_stopping_early_leaves_nothing_running(tmp_path: Path, ranks: list[Any]) -> None:
    windows = make(tmp_path, [9] * 4000, reshuffle="full")
    part = divide(2, last=10_000)
    shards = shards_of(UnevenStream(windows, seed=SEED), Cursor(), part)
    ray.get([ranks[rank].steps.remote(shards[rank], windows, part, rank, 3) for rank in range(2)])
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU") != CPUS:
        assert time.monotonic() < deadline, "tasks are still running"
        time.sleep(0.2)
    time.sleep(2)  # a process that is being ended may still write the window that it had
    built = len(list(tmp_path.rglob("*.arrow")))
    time.sleep(1)
    assert len(list(tmp_path.rglob("*.arrow"))) == built < windows.count(0)


@pytest.mark.slow
def test_bad_row_reaches_the_rank_as_what_it_is(tmp_path: Path, ranks: list[Any]) -> None:
    windows = make(tmp_path, [*LENGTHS, 17], shuffle="none")
    part = divide(2, last=100)
    shards = shards_of(Stream(windows, seed=SEED), Cursor(), part)
    running = [ranks[rank].failure.remote(shards[rank], windows, part, rank) for rank in range(2)]
    for kind, message, reason in ray.get(running):
        assert kind is RowError and reason == "too_long"
        assert "rows.jsonl:84: the row has 17 tokens, more than data.seq_len=16" in message and "\n" not in message


def test_the_first_samples_are_those_of_whole_steps_in_the_first_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = make(tmp_path, window=50)
    stream = Stream(windows, seed=SEED)
    held = list(stream.section(Cursor(), 0))
    part = divide(2, last=1000, blocks=2)
    size = part.division.global_batch
    steps = len(held) // size
    assert 0 < steps < FIRST_STEPS and len(held) % size
    read, left, cursor = first_samples(stream, Cursor(), *part)
    assert read["id"].to_pylist() == [each.sample.id for each in held[: steps * size]]
    assert left == range(1 + steps, 1001) and cursor == cursors(stream, steps, blocks=2)[-1]

    def nothing(cursor: Cursor, steps: range) -> bool:
        read, left, after = first_samples(stream, cursor, part.division, steps)
        return (len(read), left, after) == (0, steps, cursor)

    assert first_samples(stream, Cursor(), part.division, range(1, 3))[1] == range(2, 3), "Ray Data has the last step"
    assert nothing(Cursor(), range(5, 6))
    assert nothing(held[-size].after, part.steps), "the window has less than a step"
    monkeypatch.setattr("raytune_fsdp.launch.ray.tasks.stream.FIRST_BYTES", 1000)
    assert nothing(Cursor(), part.steps)


def test_census_on_all_cpus(tmp_path: Path) -> None:
    here, there = make(tmp_path / "here", window=3), make(tmp_path / "there", window=3)
    told: list[int] = []
    counted = census(there, progress=lambda _, done, __: told.append(done), build=build_on_ray)
    assert counted == census(here)
    assert told == list(range(1, 29)) and counted.built == 28
    assert all(there.counts(0, k) is not None for k in range(28))
    places = [(0, k) for k in range(28)]
    assert not any(built for _, built in build_on_ray(there, places))  # the windows are in the cache


def test_census_names_the_first_bad_row(tmp_path: Path) -> None:
    lengths = [17 if i in (30, 60) else 5 for i in range(80)]
    with pytest.raises(RowError, match=r"rows\.jsonl:31: the row has 17 tokens") as caught:
        census(make(tmp_path, lengths, shuffle="none", window=4), build=build_on_ray)
    assert type(caught.value) is RowError


@ray.remote(num_cpus=0)
def failing() -> None:
    raise RowError("a row is bad", reason="too_long")


def test_a_process_outlives_the_tasks_that_fail_for_it() -> None:
    """Ray ends a process that cancels a task while Ray itself is about to hold it for done: one of these 300."""
    for _ in range(300):
        with pytest.raises(RowError, match="a row is bad"), calls.own_errors():
            list(calls.in_order(failing.remote, failing, [()], lambda: 1))


@pytest.mark.slow
def test_it_is_said_when_no_cpu_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_FULL_SECONDS", 0.5)
    busy = Busy.options(num_cpus=CPUS).remote()
    assert ray.get(busy.ready.remote())
    until(lambda: ray.available_resources().get("CPU", 0) < 1, 20, "the CPUs are free")
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener()
    calls.logger.addHandler(listener)
    begun = time.monotonic()
    try:
        assert census(make(tmp_path), build=build_on_ray).total.rows == len(LENGTHS)
    finally:
        calls.logger.removeHandler(listener)
    assert said[0].startswith("no CPU became free for the data in time (0 of the cluster's 4 CPUs are free)")
    assert len(said) > 1
    assert time.monotonic() - begun < calls._PATIENCE_SECONDS / 2


class Shard:
    """Gives prepared blocks, as Ray's does."""

    def __init__(self, tables: list[Any]) -> None:
        self.tables = tables

    def iter_torch_batches(self, *, collate_fn: Any, **_: Any) -> Iterator[Any]:
        return (collate_fn(table) for table in self.tables)


def test_blocks_out_of_order_are_not_trained_on(tmp_path: Path) -> None:
    windows = make(tmp_path, window=50)
    part = divide(1, last=1)
    read, _, _ = first_samples(Stream(windows, seed=SEED), Cursor(), *divide(1, last=10))
    tables = list(to_blocks(iter([read]), 2, 6, 0))
    tables.append(tables[1].slice(0, 1))
    assert len(list(ray_batches(Shard(tables[:3]), windows, *part, data_rank=0))) == 1
    for order, message in (
        ([0, 2, 1], r"block 1 of the run with 2 sample\(s\) from Ray Data, but got block 2 with 2; the same"),
        ([0, 1], r"block 2 of the run with 2 sample\(s\) from Ray Data, but got the end of the data"),
        ([0, 0, 1], r"block 1 of the run .* got block 0 with 2"),
        ([0, 3], r"block 1 of the run .* got block 1 with 1"),
    ):
        with pytest.raises(TrainingError, match=message):
            list(ray_batches(Shard([tables[i] for i in order]), windows, *part, data_rank=0))
