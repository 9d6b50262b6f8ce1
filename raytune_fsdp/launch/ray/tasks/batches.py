"""A rank's batches, from its shard of the stream through Ray Data."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
from ray.data.collate_fn import ArrowBatchCollateFn

from raytune_fsdp.base.batch import Cursor, MicroBatch, PackedSample, StepBatches
from raytune_fsdp.base.errors import TransientError
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.data.batches import fill_up, stream_batch
from raytune_fsdp.data.stream import StreamSample
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.launch.ray.tasks.calls import own_errors
from raytune_fsdp.launch.ray.tasks.stream import TOKEN_COLUMNS, TOLD, to_blocks
from raytune_fsdp.plan.division import Division

if TYPE_CHECKING:
    from ray.data import DataIterator


def ray_batches(
    shard: DataIterator,
    windows: Windows,
    division: Division,
    steps: range,
    *,
    data_rank: int,
    first: pa.Table | None = None,
) -> Iterator[StepBatches]:
    """Yield the batches of `rank_batches`: made of the `first` samples, and then of this rank's shard of a
    `stream_dataset` that begins with the step after them."""
    ahead = 2 * max(division.rounds(steps[0]), 2)
    to_block = ToBlock(division)
    arrived = iter(shard.iter_torch_batches(batch_size=None, prefetch_batches=ahead, collate_fn=to_block, device="cpu"))
    # Ask at once, also where the first step has no block for this rank: Ray Data starts when all ranks have asked.
    asked = in_thread(lambda: next(arrived, None), "first-block")
    try:
        samples = 0 if first is None else len(first)
        tables = to_blocks(iter([first]), division.micro_batch, samples, division.first_micro_batch(steps[0]))
        own_tables = (table for table in tables if table["block"][0].as_py() % division.data_ranks == data_rank)
        blocks = chain(map(to_block, own_tables), map(Future.result, [asked]), arrived)
        for step in steps:
            own: list[MicroBatch] = []
            built = 0
            for index, size in enumerate(division.micro_batch_sizes(step)):
                if division.owner(step, index) == data_rank:
                    with own_errors():
                        block = next(blocks, None)
                    number = division.first_micro_batch(step) + index
                    if block is None or block.number != number or len(block.batch.sample_ids) != size:
                        raise _out_of_order(data_rank, number, size, block)
                    own.append(block.batch)
                    built += block.windows_built
            yield fill_up(step, own, division, windows, windows_built=built)
    finally:
        if asked.done():  # else a thread is in it, and ends with the process
            arrived.close()


@dataclass(frozen=True, slots=True)
class Block:
    """A block as it arrives at a rank."""

    number: int
    """The number of the block, counted from the start of the run."""
    windows_built: int
    batch: MicroBatch


class ToBlock(ArrowBatchCollateFn):  # type: ignore[misc]
    """Turns arriving tables into tensors. Ray Data calls it in threads, before the block is needed."""

    def __init__(self, division: Division) -> None:
        self._blocks_per_step = division.micro_batches

    def __call__(self, table: pa.Table) -> Block:
        number: int = table["block"][0].as_py()
        arrays = {name: table[name].combine_chunks().flatten().to_numpy() for name in TOKEN_COLUMNS}
        tokens = {name: values.reshape(len(table), -1) for name, values in arrays.items()}
        told = None
        if TOLD in table.column_names:
            flat = table[TOLD].combine_chunks().flatten().to_numpy()
            told = flat.reshape(len(table), -1, tokens["input_ids"].shape[1])
        samples = [
            StreamSample(
                PackedSample(
                    id=row["id"],
                    columns=None if told is None else told[i],
                    **{k: each[i] for k, each in tokens.items()},
                ),
                Cursor(epoch=row["epoch"], window=row["window"], index=row["index"]),
                row["built"],
            )
            for i, row in enumerate(table.select(["id", "epoch", "window", "index", "built"]).to_pylist())
        ]
        batch = stream_batch(samples, index=number % self._blocks_per_step)
        return Block(number, sum(each.built for each in samples), batch)


def _out_of_order(rank: int, number: int, size: int, block: Block | None) -> TransientError:
    found = "the end of the data" if block is None else f"block {block.number} with {len(block.batch.sample_ids)}"
    return TransientError(
        f"rank {rank} expected block {number} of the run with {size} sample(s) from Ray Data, but got {found}; the "
        "same command continues from the last checkpoint, with cluster.launch=local also without Ray"
    )
