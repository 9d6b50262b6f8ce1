"""For any datasets, weights, windows, policies and worlds: every row as often as its weight says, and one order."""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from raytune_fsdp.base.batch import PADDING, Cursor, StepBatches
from raytune_fsdp.data.batches import rank_batches
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.division import Division
from tests.rows import all_samples, make_windows, token_rows

ROWS = st.lists(st.integers(2, 40), min_size=1, max_size=25)
EPOCHS = 4


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    many = draw(st.integers(1, 3))
    weights = draw(st.lists(st.sampled_from([0, 0.25, 0.5, 1, 1.75, 3]), min_size=many, max_size=many).filter(any))
    return {
        "lengths": draw(st.lists(ROWS, min_size=many, max_size=many)),
        "weights": weights,
        "seq_len": draw(st.integers(5, 40)),
        "window": draw(st.integers(1, 40)),
        "packing": draw(st.sampled_from(["best_fit", "concat", "none"])),
        "shuffle": draw(st.sampled_from(["rows", "blocks", "none"])),
        "long_documents": draw(st.sampled_from(["truncate", "drop", "split"])),
    }


def open_mixture(directory: str, mixture: dict[str, Any]) -> Windows:
    """Row i of dataset d is as many tokens 100 * (d + 1) + i as its length says."""
    options = dict(mixture)
    datasets = [
        token_rows(Path(directory), lengths, name=f"rows{d}", first_id=100 * (d + 1), weight=weight)
        for d, (lengths, weight) in enumerate(zip(options.pop("lengths"), options.pop("weights"), strict=True))
    ]
    return make_windows(datasets, cache=Path(directory), **options)


def kept(length: int, mixture: dict[str, Any]) -> int:
    """Tokens of a row that the policy leaves."""
    policy, seq_len = mixture["long_documents"], mixture["seq_len"]
    if length <= seq_len or policy == "split":
        return length
    return seq_len if policy == "truncate" else 0


@settings(max_examples=25, deadline=None)
@given(mixture=mixtures())
def test_every_row_as_often_as_its_weight_and_nothing_lost_but_by_policy(mixture: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        windows = open_mixture(directory, mixture)
        samples = [sample for epoch in range(EPOCHS) for sample in all_samples(windows, epoch)]
        counts = [windows.get(e, k)[0].counts for e in range(EPOCHS) for k in range(windows.count(e))]
    found: Counter[int] = Counter()
    for sample in samples:
        real = sample.source_ids != PADDING
        found.update(sample.input_ids[real].tolist())
        assert (sample.input_ids[real] // 100 - 1 == sample.source_ids[real]).all()
    want = Counter(
        {
            100 * (d + 1) + i: round(EPOCHS * weight) * kept(length, mixture)
            for d, (lengths, weight) in enumerate(zip(mixture["lengths"], mixture["weights"], strict=True))
            for i, length in enumerate(lengths)
        }
    )
    assert +want == found
    total = [sum(count.datasets[d].tokens for count in counts) for d in range(len(mixture["lengths"]))]
    assert total == [sum(n for t, n in want.items() if t // 100 == d + 1) for d in range(len(total))]
    for d, (lengths, weight) in enumerate(zip(mixture["lengths"], mixture["weights"], strict=True)):
        times, long = round(EPOCHS * weight), sum(length > mixture["seq_len"] for length in lengths)
        dropped = sum(count.datasets[d].dropped.get("too_long", 0) for count in counts)
        truncated = sum(count.datasets[d].truncated for count in counts)
        assert dropped == (times * long if mixture["long_documents"] == "drop" else 0)
        assert truncated == (times * long if mixture["long_documents"] == "truncate" else 0)
        assert sum(count.datasets[d].rows for count in counts) == times * len(lengths)


@settings(max_examples=10, deadline=None)
@given(mixture=mixtures(), data=st.data())
def test_one_stream_for_all_worlds_from_every_step(mixture: dict[str, Any], data: st.DataObject) -> None:
    blocks, micro = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    batch, last = blocks * micro, data.draw(st.integers(2, 7))
    start = data.draw(st.integers(1, last - 1))
    with tempfile.TemporaryDirectory() as directory:
        windows = open_mixture(directory, {**mixture, "long_documents": "truncate"})

        def ranks(world: int, first: int, cursor: Cursor) -> list[list[StepBatches]]:
            division = Division(total_samples=None, global_batch=batch, micro_batch=micro, data_ranks=world)
            return [
                list(
                    rank_batches(
                        Stream(windows, seed=5), division, range(first, last + 1), cursor=cursor, data_rank=rank
                    )
                )
                for rank in range(world)
            ]

        stream = [each.sample.id for each in islice(Stream(windows, seed=5).samples(Cursor()), last * batch)]
        for world in (1, 3, 7):
            whole = ranks(world, 1, Cursor())
            assert interleaved(whole, blocks) == stream
            cursor = max((b for rank in whole for b in rank[start - 1].micro_batches), key=lambda b: b.index).after
            tail = ranks(world, start + 1, cursor)
            assert [[held(step) for step in rank] for rank in tail] == [
                [held(step) for step in rank[start:]] for rank in whole
            ]


def interleaved(ranks: list[list[StepBatches]], blocks: int) -> list[int]:
    """Sample ids in the order of the run, put together by the rule of ownership alone."""
    queues = [[block for step in rank for block in step.micro_batches if not block.is_filler][::-1] for rank in ranks]
    total = sum(map(len, queues))
    assert total == len(ranks[0]) * blocks
    return [i for number in range(total) for i in queues[number % len(ranks)].pop().sample_ids]


def held(step: StepBatches) -> tuple[Any, ...]:
    return step.step, [(b.index, b.sample_ids, b.labels.tolist(), b.position_ids.tolist()) for b in step.micro_batches]
