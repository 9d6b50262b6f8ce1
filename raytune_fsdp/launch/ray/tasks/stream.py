"""The stream and the census on a Ray cluster: CPU tasks build windows, wherever there are CPUs.

A task that reserves no CPU keeps builds in flight, takes their windows in the order of the stream, and yields blocks of
`micro_batch` samples. It is a Ray Data source: when enough blocks are ready, Ray Data stops pulling, so the task waits
and no window is built further ahead. The blocks go to the ranks in turn (`split`), and each rank makes its batches of
them (`batches.py`). There is no list of windows: how many a run needs becomes known as they are built.

Nothing here imports torch: the processes that build windows start in half the time without it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.data.census import Places
from raytune_fsdp.data.stream import Stream, StreamSample
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.launch.ray.tasks.calls import cpus, in_order, on_a_cpu, opened, own_errors
from raytune_fsdp.plan.counts import WindowCounts
from raytune_fsdp.plan.division import Division

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.data import DataIterator, Dataset

AHEAD_BYTES = 1 << 30
"""Windows that are built ahead take at most this much of the cluster's object store, and at most a quarter of it."""

FIRST_AHEAD = 8
"""Windows that are built ahead at first, while it is unknown how large they are."""

READY_BYTES = 256 << 20
"""Blocks that are ready take at most this much of the object store, or four blocks per rank if that is more."""

FIRST_STEPS, FIRST_BYTES = 8, 64 << 20
"""Steps whose samples rank 0 reads itself, and the most that these take. Ray Data needs 5 s to start the processes of a
stream (docs/results.md): eight steps of a model that is worth several GPUs take as long."""

COUNTED_PER_CPU = 2
"""Windows in flight per CPU in a census, so that no CPU waits for its next window."""

TOKEN_COLUMNS = ("input_ids", "labels", "position_ids", "source_ids")
TOLD = "columns"
"""What a loss of the user's own is told of the tokens' rows, if there is such a loss."""
_FIRST_BLOCK, _BYTES_PER_BLOCK = "raytune_fsdp.first_block", "raytune_fsdp.bytes_per_block"


def stream_dataset(stream: Stream, cursor: Cursor, *, micro_batch: int, samples: int, first_block: int = 0) -> Dataset:
    """Return the next `samples` samples from `cursor` on, `micro_batch` in a block, fewer in the last. Start nothing.

    `first_block` is the number of the first block in the run: `Division.first_micro_batch` of the first step.
    """
    here = ray.get_runtime_context().get_node_id()
    source = StreamDatasource(partial(_blocks, ray.put(stream), cursor, micro_batch, samples, first_block), samples)
    # On this node, next to the actor that hands out the blocks: if the node is lost, so is the stream in any case.
    dataset = ray.data.read_datasource(
        source, override_num_blocks=1, num_cpus=0, label_selector={"ray.io/node-id": here}
    )
    block_bytes = micro_batch * _sample_bytes(stream.windows)
    context = dataset.context
    context.set_config(_FIRST_BLOCK, first_block)
    context.set_config(_BYTES_PER_BLOCK, block_bytes)
    # Ray Data merges blocks smaller than this target and splits those larger than 1.5 times it: at three quarters of a
    # block, both leave our blocks as they are.
    context.target_max_block_size = block_bytes * 3 // 4
    context.execution_options.preserve_order = True  # without it, three executions gave three different orders
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return dataset


def first_samples(stream: Stream, cursor: Cursor, division: Division, steps: range) -> tuple[pa.Table, range, Cursor]:
    """Return the samples of the first steps, as far as the stream's first window has them; the steps that are left; and
    where those begin. Thus the first steps need not wait until Ray Data has started, which takes seconds.
    """
    # Ray Data always has the last step, which may be short.
    most = min(FIRST_STEPS, FIRST_BYTES // (_sample_bytes(stream.windows) * division.global_batch), len(steps) - 1)
    samples = list(islice(stream.section(cursor, 0), most * division.global_batch)) if most else []
    num = len(samples) // division.global_batch
    samples = samples[: num * division.global_batch]
    return _to_table(samples, stream.windows), steps[num:], samples[-1].after if samples else cursor


def to_blocks(tables: Iterator[pa.Table], micro_batch: int, samples: int, first_block: int) -> Iterator[pa.Table]:
    """Yield the first `samples` samples of these tables as numbered blocks."""
    rest: pa.Table | None = None
    block, left = first_block, samples
    while left:
        table = next(tables).slice(0, left)
        left -= len(table)
        if rest is not None:
            table = pa.concat_tables([rest, table])
        whole = len(table) if not left else len(table) // micro_batch * micro_batch
        for first in range(0, whole, micro_batch):
            part = table.slice(first, min(micro_batch, whole - first))
            yield part.append_column("block", pa.array(np.full(len(part), block, dtype=np.int64)))
            block += 1
        rest = table.slice(whole)


class StreamDatasource(Datasource):  # type: ignore[misc]
    """A single task that yields the blocks one after another."""

    def __init__(self, blocks: Callable[[], Iterator[pa.Table]], samples: int) -> None:
        super().__init__()
        self._task = ReadTask(blocks, BlockMetadata(samples, None, None, None))

    def estimate_inmemory_data_size(self) -> None:
        return None

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None) -> Any:
        return [self._task]


def split(dataset: Dataset, world: int) -> list[DataIterator]:
    """Return a shard for each rank: block g of the run goes to rank g mod world, wherever the stream begins."""
    context = dataset.context
    ready = max(READY_BYTES, 4 * world * context.get_config(_BYTES_PER_BLOCK))
    context.execution_options.resource_limits = ray.data.ExecutionResources(object_store_memory=ready)
    # Not equal=True, which would drop the last blocks to give every rank the same number of rows. Blocks of one size go
    # to the shards in turn anyway.
    shards = dataset.streaming_split(world, equal=False)
    first = context.get_config(_FIRST_BLOCK) % world
    return [shards[(rank - first) % world] for rank in range(world)]


def build_on_ray(windows: Windows, places: Places) -> Iterator[tuple[WindowCounts, bool]]:
    """Build the windows of a census on all CPUs of the cluster. They stay in the cache; only their counts come back.

    The counts come in order, so that among several bad rows always the same one is reported.
    """
    held = ray.put(windows)
    calls = (([held], epoch, k) for epoch, k in places)
    with own_errors(), closing(in_order(_count_task.remote, _count, calls, lambda: COUNTED_PER_CPU * cpus())) as counts:
        yield from counts


def _blocks(held: ObjectRef, cursor: Cursor, micro_batch: int, samples: int, first_block: int) -> Iterator[pa.Table]:
    """Yield the blocks of the stream, in the source's task."""
    with closing(_sections(held, cursor)) as tables:
        yield from to_blocks(tables, micro_batch, samples, first_block)


def _sections(held: ObjectRef, cursor: Cursor) -> Generator[pa.Table, None, None]:
    """Yield the windows of the stream in order, as tables of samples, without end."""
    most = min(AHEAD_BYTES, int(ray.cluster_resources().get("object_store_memory", 0)) // 4)
    taken, largest, empty = 0, 1, 0

    def ahead() -> int:
        return max(2, min(cpus(), most // largest, FIRST_AHEAD + taken))

    calls = (([held], cursor, k) for k in count())
    with closing(in_order(_section_task.remote, _section, calls, ahead, first_here=True)) as tables:
        for table in tables:
            taken, largest = taken + 1, max(largest, table.nbytes)
            empty = 0 if len(table) else empty + 1
            if empty:
                ray.get(held).check_not_empty(empty)
            yield table


def _section(held: Sequence[ObjectRef], cursor: Cursor, number: int) -> pa.Table:
    stream: Stream = opened(held[0])
    return _to_table(list(stream.section(cursor, number)), stream.windows)


def _count(held: Sequence[ObjectRef], epoch: int, k: int) -> tuple[WindowCounts, bool]:
    windows: Windows = opened(held[0])
    window, built = windows.get(epoch, k, must_keep=True)
    return window.counts, built


_section_task, _count_task = on_a_cpu(_section), on_a_cpu(_count)


def _sample_bytes(windows: Windows) -> int:
    """Return the bytes of a row of `_to_table`: int32 tokens, what a loss is told of them, and five 8-byte columns with
    the number of the block."""
    return (4 * len(TOKEN_COLUMNS) + 8 * len(windows.columns)) * windows.seq_len + 8 * 5


def _to_table(samples: Sequence[StreamSample], windows: Windows) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for name in TOKEN_COLUMNS:
        values = [getattr(each.sample, name) for each in samples] or [np.empty(0, dtype=np.int32)]
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(values)), windows.seq_len)
    if windows.columns:
        told = [each.sample.columns for each in samples if each.sample.columns is not None]
        flat = np.concatenate([each.reshape(-1) for each in told] or [np.empty(0)])
        columns[TOLD] = pa.FixedSizeListArray.from_arrays(pa.array(flat), windows.seq_len * len(windows.columns))
    columns["id"] = pa.array([each.sample.id for each in samples], pa.int64())
    for name in ("epoch", "window", "index"):
        columns[name] = pa.array([getattr(each.after, name) for each in samples], pa.int64())
    columns["built"] = pa.array([each.built for each in samples], pa.bool_())
    return pa.table(columns)
