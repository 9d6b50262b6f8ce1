"""The stream and its ranks: every sample exactly once, the same from any start and at any world size."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune_fsdp.base.batch import IGNORE, PADDING, Cursor, MicroBatch, StepBatches
from raytune_fsdp.base.errors import DataError, ResumeError
from raytune_fsdp.data.batches import FILLER_INDEX, eval_batches, rank_batches
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.to_device import map_tensors, to_device
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.division import Division
from tests.rows import all_samples, make_windows, token_rows

LENGTHS = [2 + (7 * i) % 15 for i in range(61)]


def make(lengths: Sequence[int], **options: Any) -> Windows:
    """Row i is `lengths[i]` times the token i + 2. Every window is built before the file is gone."""
    with tempfile.TemporaryDirectory() as directory:
        windows = make_windows([token_rows(Path(directory), lengths)], cache=Path(directory), **options)
        for k in range(windows.count(0)):
            windows.get(0, k)
    return windows


def num_samples(windows: Windows) -> int:
    return len(all_samples(windows))


def steps(
    windows: Windows, *, world: int, rank: int, last: int, batch: int = 6, micro: int = 2, total: int | None = None,
    first: int = 1, cursor: Cursor | None = None,
) -> list[StepBatches]:  # fmt: skip
    division = Division(total_samples=total, global_batch=batch, micro_batch=micro, data_ranks=world)
    stream, cursor = Stream(windows, seed=5), cursor or Cursor()
    return list(rank_batches(stream, division, range(first, last + 1), cursor=cursor, data_rank=rank))


def after(ranks: list[list[StepBatches]], step: int) -> Cursor:
    """The cursor behind the step at this place, from the rank that has its last block."""
    blocks = [block for rank in ranks for block in rank[step].micro_batches if not block.is_filler]
    return max(blocks, key=lambda block: block.index).after


def interleaved(ranks: list[list[StepBatches]], *, blocks_per_step: int) -> list[list[int]]:
    """Sample ids of each step, put together from all ranks by the rule of ownership."""
    world, result = len(ranks), []
    for of_step in zip(*ranks, strict=True):
        blocks = {
            block.index: (rank, block)
            for rank, s in enumerate(of_step)
            for block in s.micro_batches
            if not block.is_filler
        }
        step = of_step[0].step
        for index in range(len(blocks)):
            assert blocks[index][0] == ((step - 1) * blocks_per_step + index) % world
        result.append([i for index in range(len(blocks)) for i in blocks[index][1].sample_ids])
    return result


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=60), extra=st.integers(0, 20), window=st.integers(1, 70)
)
def test_every_document_once_in_every_epoch(lengths: list[int], extra: int, window: int) -> None:
    windows = make(lengths, seq_len=12 + extra, window=window)
    count = num_samples(windows)
    stream = list(islice(Stream(windows, seed=1).samples(Cursor()), 2 * count))
    assert stream[count - 1].after == Cursor(epoch=1)
    for epoch in (stream[:count], stream[count:]):
        found: Counter[int] = Counter()
        for each in epoch:
            found.update(each.sample.input_ids[each.sample.source_ids != PADDING].tolist())
        assert found == {2 + i: n for i, n in enumerate(lengths)}


@settings(max_examples=25, deadline=None)
@given(data=st.data(), world=st.integers(1, 7), blocks=st.integers(1, 5), micro=st.integers(1, 3))
def test_steps_take_the_stream_in_order(data: st.DataObject, world: int, blocks: int, micro: int) -> None:
    windows = make(LENGTHS[: data.draw(st.integers(1, 61))], window=data.draw(st.integers(1, 61)))
    batch, total = blocks * micro, data.draw(st.integers(1, 2 * num_samples(windows)))
    last = -(-total // batch)
    ranks = [
        steps(windows, world=world, rank=r, last=last, batch=batch, micro=micro, total=total) for r in range(world)
    ]
    stream = [each.sample.id for each in islice(Stream(windows, seed=5).samples(Cursor()), total)]
    expected = [stream[s * batch : (s + 1) * batch] for s in range(last)]
    assert interleaved(ranks, blocks_per_step=blocks) == expected
    for of_step in zip(*ranks, strict=True):
        assert len({len(s.micro_batches) for s in of_step}) == 1


def test_every_world_size_has_the_same_steps() -> None:
    windows = make(LENGTHS)
    results = [
        interleaved([steps(windows, world=w, rank=r, last=15) for r in range(w)], blocks_per_step=3)
        for w in (1, 2, 3, 4, 7)
    ]
    assert len(results[0]) == 15 and all(result == results[0] for result in results)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_same_tail_from_every_step_on_every_rank(world: int) -> None:
    windows = make(LENGTHS)
    last = 2 * num_samples(windows) // 6
    whole = [steps(windows, world=world, rank=rank, last=last) for rank in range(world)]
    for done in range(1, last):
        cursor = after(whole, done - 1)
        for rank in range(world):
            tail = steps(windows, world=world, rank=rank, first=done + 1, last=last, cursor=cursor)
            assert [seen(s) for s in tail] == [seen(s) for s in whole[rank][done:]]


def seen(step: StepBatches) -> tuple[object, ...]:
    return step.step, [(b.index, b.sample_ids, b.tokens, b.after, b.input_ids.tolist()) for b in step.micro_batches]


def test_resume_goes_back_to_no_window_that_was_used_up() -> None:
    stream = Stream(make(LENGTHS), seed=5)
    for each in islice(stream.samples(Cursor()), num_samples(stream.windows) - 1):
        first = next(stream.section(each.after, 0))
        assert stream.place(each.after, 0) == (0, each.after.window)
        assert first.after.window - each.after.window in (0, 1) or first.after.epoch == 1


def test_sections_are_the_stream() -> None:
    windows = make(LENGTHS)
    count = 3 * num_samples(windows)
    whole = [(each.sample.id, each.after) for each in islice(Stream(windows, seed=5).samples(Cursor()), count)]
    for done in (0, 1, 7, num_samples(windows)):
        cursor = whole[done - 1][1] if done else Cursor()
        stream = Stream(windows, seed=5)
        sections = [each for number in range(2 * windows.count(0)) for each in stream.section(cursor, number)]
        assert [(each.sample.id, each.after) for each in sections][: count - done] == whole[done : done + len(sections)]


def test_first_sample_of_a_window_says_whether_it_was_built(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [9] * 24)]
    first = list(islice(Stream(make_windows(rows, cache=tmp_path), seed=5).samples(Cursor()), 48))
    assert [i for i, each in enumerate(first) if each.built] == [0, 8, 16]
    again = list(islice(Stream(make_windows(rows, cache=tmp_path), seed=5).samples(first[11].after), 24))
    assert not any(each.built for each in again)


def test_epochs_differ_in_order_only() -> None:
    windows = make(LENGTHS)
    count = num_samples(windows)
    ids = [each.sample.id for each in islice(Stream(windows, seed=5).samples(Cursor()), 2 * count)]
    assert ids[:count] != ids[count:] and sorted(ids[:count]) == sorted(ids[count:])
    in_order = make(LENGTHS, shuffle="none")
    ids = [each.sample.id for each in islice(Stream(in_order, seed=5).samples(Cursor()), 2 * num_samples(in_order))]
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]


def test_windows_without_samples_are_passed_over() -> None:
    windows = make([20, 20, 3, 20, 4, 20], window=1, long_documents="drop")
    stream = list(islice(Stream(windows, seed=5).samples(Cursor()), 4))
    found = [int(each.sample.input_ids[0]) for each in stream]
    assert sorted(found[:2]) == sorted(found[2:]) == [4, 6]
    for index in range(3):
        assert next(Stream(windows, seed=5).samples(stream[index].after)).sample.id == stream[index + 1].sample.id


def test_stream_of_nothing_ends_with_an_error() -> None:
    windows = make([20, 20], window=1, long_documents="drop")
    with pytest.raises(
        DataError, match=r"no row of rows is left after dropping .*long_documents=drop.*data\.seq_len=16"
    ):
        next(Stream(windows, seed=5).samples(Cursor()))


@pytest.mark.parametrize("cursor", [Cursor(window=99), Cursor(index=99), Cursor(epoch=-1)])
def test_cursor_of_other_data(cursor: Cursor) -> None:
    with pytest.raises(ResumeError, match=r"Cursor\(.*99.* outside .*other data|Cursor\(epoch=-1.*other data"):
        next(Stream(make(LENGTHS), seed=5).samples(cursor))


def assert_filler(block: MicroBatch, *, shape: tuple[int, int]) -> None:
    assert block.is_filler and block.index == FILLER_INDEX
    assert (block.tokens, block.target_tokens, block.attended_pairs) == (0, 0, 0)
    for tensor in (block.input_ids, block.labels, block.position_ids, block.source_ids):
        assert tensor.shape == shape and tensor.dtype == torch.int64
    assert (block.labels == IGNORE).all() and (block.source_ids == PADDING).all()
    assert (block.input_ids == 0).all() and block.position_ids[-1].tolist() == list(range(shape[1]))


def test_fillers_come_last_and_weigh_nothing() -> None:
    windows = make(LENGTHS)
    for rank in range(2):
        for step in steps(windows, world=2, rank=rank, last=6):
            # Three blocks for two ranks: the owner of the first block also has the third.
            owns_two = (3 * (step.step - 1)) % 2 == rank
            assert [block.is_filler for block in step.micro_batches] == [False, not owns_two]
            if not owns_two:
                assert_filler(step.micro_batches[1], shape=(2, 16))


def test_short_last_batch() -> None:
    windows = make(LENGTHS)
    # Three full steps of six, then three samples: a block of two and a block of one.
    ranks = [steps(windows, world=4, rank=r, last=4, total=21)[-1] for r in range(4)]
    rows = {
        rank: step.micro_batches[0].input_ids.shape[0]
        for rank, step in enumerate(ranks)
        if not step.micro_batches[0].is_filler
    }
    assert rows == {9 % 4: 2, 10 % 4: 1}
    assert [len(step.micro_batches) for step in ranks] == [1, 1, 1, 1]
    assert_filler(ranks[0].micro_batches[0], shape=(2, 16))


def test_counts_of_a_batch() -> None:
    windows = make([5, 3, 7, 16], window=4, shuffle="none")
    (step,) = steps(windows, world=1, rank=0, last=1, batch=2, micro=2)
    (block,) = step.micro_batches
    assert (block.tokens, block.target_tokens) == (31, 31 - 4)
    assert block.attended_pairs == sum(n * (n + 1) // 2 for n in (5, 3, 7, 16))
    assert len(block.sample_ids) == 2 and block.index == 0


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_eval_goes_over_all_samples_once(world: int) -> None:
    windows = make(LENGTHS)
    ranks = [list(eval_batches(windows, micro_batch=3, data_ranks=world, data_rank=r)) for r in range(world)]
    assert len({len(blocks) for blocks in ranks}) == 1
    blocks = sorted((b for of_rank in ranks for b in of_rank if not b.is_filler), key=lambda b: b.index)
    expected = [sample.id for sample in all_samples(windows)]
    assert [i for block in blocks for i in block.sample_ids] == expected
    assert len(ranks[0]) == -(-len(blocks) // world)
    assert all(of_rank[i].is_filler <= (i == len(of_rank) - 1) for of_rank in ranks for i in range(len(of_rank)))


def test_what_travels_with_a_block_to_the_device() -> None:
    """Borders and targets are found on the host; every tensor goes along, whatever it stands in."""
    windows = make([5, 3, 7, 16], window=4, shuffle="none")
    (step,) = steps(windows, world=1, rank=0, last=1, batch=2, micro=2)
    (block,) = step.micro_batches
    flat, row = block.position_ids.flatten(), block.labels.shape[1]
    assert block.borders.starts.tolist() == [*torch.nonzero(flat == 0).flatten().tolist(), flat.numel()]
    assert block.borders.longest == 16
    predicted = [(p, int(t)) for p, t in enumerate(block.labels.flatten()[1:]) if t != IGNORE and (p + 1) % row]
    assert list(zip(block.targets.places.tolist(), block.targets.ids.tolist(), strict=True)) == predicted
    assert block.targets.by_dataset == (len(predicted),) == (block.target_tokens,)
    seen: list[torch.Tensor] = []
    moved = map_tensors(step, lambda tensor: seen.append(tensor) or tensor.clone())
    assert len(seen) == 4 + 1 + 3 + 1
    assert (
        torch.equal(moved.micro_batches[0].targets.ids, block.targets.ids)
        and moved.micro_batches[0].sample_ids == block.sample_ids
    )
    assert moved.counts is not step.counts and torch.equal(moved.counts, step.counts)
    assert next(to_device(iter([step]), torch.device("cpu"))) is step
