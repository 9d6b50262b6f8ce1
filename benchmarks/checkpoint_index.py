"""What the index of a checkpoint costs: on rank 0, while training goes on, and on every rank that reads it.

    python -m benchmarks.checkpoint_index [--ranks 8 64 512] [--out benchmarks/results/checkpoint_index.json]

The tensors of a Llama of 70B and AdamW's state, sharded over so many ranks. There are no such ranks and no numbers: the
pieces are worked out, and files of tensors are what their tables say, with a hole before them. Everything else is what
a run does. Seconds are processor time, of one thread.

- layout: rank 0 decides who writes what, once an attempt
- commit: rank 0 takes a message of each rank from the store, writes the index and the manifest, without asking storage
  for the size of every file
- digest: with run.exact, what comes to that: rank 0 takes what was hashed from the store, and joins it
- longest wait: a thread that does nothing but look at the clock, meanwhile: its longest pause, by the clock
- index: a rank reads and checks manifest and index
- load: a rank finds its pieces, reads the tables of their files, and checks them, at the same number of ranks
- half: the same on half as many ranks as have written
- with --older, as every checkpoint of format 1 had it: `.metadata` for torch, made by rank 0; the index of all places,
  made by rank 0; and read and checked by a rank
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from benchmarks.record import write_result
from raytune_fsdp.base.row_hashes import HashedRows, Hashes, TensorRows, digests_of, join_by_pairs
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.index import Index, parse_index
from raytune_fsdp.checkpoint.manifest import make_manifest
from raytune_fsdp.checkpoint.messages import Messages
from raytune_fsdp.checkpoint.reading import read_index
from raytune_fsdp.checkpoint.storage import INDEX_FILE, STATE_FILE, PosixStorage
from raytune_fsdp.checkpoint.writing import PieceLayout, Sum, arrange, write_small
from raytune_fsdp.model.pieces.pieces import range_of
from raytune_fsdp.tools.torch_metadata import write_torch_metadata

NAME = "step-00000001.a1"
AROUND = 704, 500
"""What torch.save writes before and behind the numbers of a piece."""
Shapes = dict[str, tuple[int, ...]]
Typed = dict[str, tuple[torch.dtype, torch.Size]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--older", action="store_true", help="also an index of format 1")
    parser.add_argument("--out", type=Path)
    found = parser.parse_args()
    shapes = tensors(found.layers)
    rows = {}
    for ranks in found.ranks:
        with tempfile.TemporaryDirectory() as directory:
            rows[ranks] = measure(shapes, ranks, Path(directory), older=found.older)
        print(ranks, {name: round(value, 4) for name, value in rows[ranks].items()}, flush=True)
    if found.out is not None:
        write_result(found.out, {"tensors": len(shapes), "ranks": rows})


def tensors(layers: int) -> Shapes:
    """The shapes of a Llama of 70B, with 80 layers, and of what AdamW keeps."""
    width, inner, heads, words = 8192, 28672, 1024, 128256
    layer = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (heads, width), "self_attn.v_proj": (heads, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    weights: Shapes = {"model.embed_tokens.weight": (words, width)}
    weights |= {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in layer.items()}
    weights |= {"model.norm.weight": (width,), "lm_head.weight": (words, width)}
    found = {f"model.{name}": shape for name, shape in weights.items()}
    for name, shape in weights.items():
        found |= {f"optim.{name}.step": (), f"optim.{name}.exp_avg": shape, f"optim.{name}.exp_avg_sq": shape}
    return found


def box(shape: Sequence[int], ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Offset and shape of a rank's piece."""
    if not shape:
        return [], []
    start, stop = range_of(shape[0], ranks, rank)
    return [start, *[0] * (len(shape) - 1)], [stop - start, *shape[1:]]


def cut(shape: Sequence[int], ranks: int, rank: int) -> list[int]:
    """First row, rows, first column and columns of a rank's piece."""
    offset, sides = box(shape, ranks, rank)
    (row, column), (rows, columns) = [*offset, 0, 0][:2], [*sides, 1, 1][:2]
    return [row, rows, column, columns]


def measure(shapes: Shapes, ranks: int, root: Path, *, older: bool) -> dict[str, float]:
    boxes = np.array([[cut(shape, ranks, rank) for shape in shapes.values()] for rank in range(ranks)], np.int64)
    row: dict[str, float] = {}
    typed: Typed = {name: (torch.float32, torch.Size(shape)) for name, shape in shapes.items()}
    with timed(row, "layout"):
        index, mine = arrange(typed, boxes)
    storage, names = PosixStorage(str(root)), [*shapes]
    messages = []
    (root / NAME).mkdir()
    for rank, numbers in enumerate(mine):
        table, size = table_of({names[n]: boxes[rank, n, 1] * boxes[rank, n, 3] * 4 for n in numbers})
        with open(root / NAME / f"__{rank}_1.distcp", "wb") as file:
            file.seek(size)
            file.write(table)
        total = {"bytes": size + len(table), "xxh3": "0" * 32}
        messages.append(
            {
                "file": file.name.rpartition("/")[2],
                "sum": total,
                "table": (len(table), xxhash.xxh3_128_hexdigest(table)),
            }
        )
    layout = PieceLayout(mine=(), rows={}, tensors=index)
    row["longest_wait"] = longest_wait(lambda: row.update(commit=commit(layout, messages, storage)))
    row.update(digest(hashes_of(typed, boxes, mine), typed))
    row["index_MB"] = (root / NAME / INDEX_FILE).stat().st_size / 1e6
    with timed(row, "index"):
        found = read_index(storage, NAME)
    with timed(row, "load"):
        row["tables_read"] = load(found, storage, shapes, ranks, ranks // 2)
    found = read_index(storage, NAME)
    with timed(row, "half"):
        load(found, storage, shapes, max(1, ranks // 2), ranks // 4)
    if older:
        with timed(row, "older_metadata"):
            write_torch_metadata(CommittedCheckpoint(1, 1, str(root)))
        with timed(row, "older_index_made"):
            content = older_index(found, storage)
        row["older_index_MB"] = len(content) / 1e6
        with timed(row, "older_index"):
            parse_index(content, {each.name: each.size for each in found.files})
    return row


def table_of(sizes: Mapping[str, Any]) -> tuple[bytes, int]:
    """The table of a file with pieces of these sizes, and where it begins."""
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = (end + AROUND[0], end, int(size) + sum(AROUND))
        end += int(size) + sum(AROUND)
    return json.dumps(places).encode(), end


def commit(layout: PieceLayout, sent: Sequence[Mapping[str, Any]], storage: PosixStorage) -> float:
    """Seconds of this thread for what `SaveInFlight` does when all ranks have written."""
    messages = Messages(dist.TCPStore("127.0.0.1", 0, is_master=True))
    for rank, message in enumerate(sent):
        messages.send(f"1/{rank}", message)
    began = time.thread_time()
    written = [messages.receive(f"1/{rank}") for rank in range(len(sent))]
    sums = {each["file"]: Sum(**each["sum"]) for each in written}  # type: ignore[index]
    small = {INDEX_FILE: layout.index([(each["file"], *each["table"]) for each in written]), STATE_FILE: b"{}"}  # type: ignore[index]
    draft = storage.draft(NAME, 1)
    sums |= {name: write_small(draft, name, content) for name, content in small.items()}
    manifest = make_manifest(sums)
    seconds = time.thread_time() - began
    for name in small:
        os.replace(draft.staging / name, draft.final / name)
    (draft.final / "manifest.json").write_text(manifest)
    return seconds


def hashes_of(typed: Typed, boxes: NDArray[np.int64], mine: Sequence[Sequence[int]]) -> list[Hashes]:
    """What each rank has hashed: the largest nodes that lie within its rows, with no numbers behind them.

    A row of these tensors is at least a leaf, except in norms and steps, of which there are few.
    """
    found: list[Hashes] = []
    names = [*typed]
    for rank, numbers in enumerate(mine):
        hashes: dict[str, list[HashedRows]] = {}
        for number in numbers:
            rows = TensorRows.of(names[number], *typed[names[number]])
            first, count = (int(each) for each in boxes[rank, number, :2])
            start, stop = -(-first // rows.leaf), -(-(first + count) // rows.leaf)
            nodes = []
            while start < stop:
                level = min((start & -start).bit_length() - 1 if start else 64, (stop - start).bit_length() - 1)
                nodes.append((level, start >> level, xxhash.xxh3_128_hexdigest(f"{number} {start}".encode()) * 2))
                start += 1 << level
            hashes[names[number]] = [HashedRows(nodes, [])]
        found.append(hashes)
    return found


def digest(hashed: Sequence[Hashes], typed: Typed) -> dict[str, float]:
    """Let all ranks join what they have hashed, one after another; measure rank 0 alone."""
    messages = Messages(dist.TCPStore("127.0.0.1", 0, is_master=True))
    rows = {name: TensorRows.of(name, *each) for name, each in typed.items()}
    sizes: list[int] = []

    def send(rank: int, value: object) -> None:
        sizes.append(len(json.dumps(value)))
        messages.send(f"1/hashes/{rank}", [value])

    def receive(rank: int) -> Any:
        return messages.receive(f"1/hashes/{rank}")[0]  # type: ignore[index]

    gc.collect()  # of what the other ranks have, which is not in rank 0's process
    gc.freeze()
    for rank in reversed(range(len(hashed))):
        began = time.thread_time()
        found = join_by_pairs(
            hashed[rank], rows, rank=rank, world=len(hashed), send=partial(send, rank), receive=receive
        )
    assert found is not None and not isinstance(found, str)
    digests_of(found, rows)
    gc.unfreeze()
    return {"digest": time.thread_time() - began, "largest_message_MB": max(sizes, default=0) / 1e6}


def longest_wait(work: Callable[[], object]) -> float:
    """How long Python's lock was kept from another thread, at most."""
    thread, last, longest = threading.Thread(target=work), time.perf_counter(), 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    return longest


def load(index: Index, storage: PosixStorage, shapes: Shapes, ranks: int, rank: int) -> int:
    """Find all that a rank reads; return how many tables that took."""
    wanted: dict[int, list[tuple[str, Any]]] = {}
    for name, shape in shapes.items():
        for number, (offset, _) in index.tensors[name].overlapping(*box(shape, ranks, rank)):
            wanted.setdefault(number, []).append((name, offset))
    for number, keys in wanted.items():
        with storage.open(NAME, index.files[number].name) as source:
            places = index.places_in(number, source)
            assert all(key in places for key in keys)
    return len(wanted)


def older_index(index: Index, storage: PosixStorage) -> bytes:
    """The index of the same files in format 1."""
    places = {}
    for number, file in enumerate(index.files):
        with storage.open(NAME, file.name) as source:
            places.update({(number, *key): place for key, place in index.places_in(number, source).items()})
    found: dict[str, Any] = {}
    for name, tensor in index.tensors.items():
        pieces = []
        for run in tensor.runs:
            size = int(np.prod(run.shape)) * 4
            for number, offset in map(run.at, range(run.count)):
                where = {"file": index.files[number].name, "start": places[number, name, offset][0], "bytes": size}
                pieces.append({"offset": [*offset], "shape": [*run.shape], **where})
        found[name] = {"dtype": "float32", "shape": [*tensor.shape], "pieces": pieces}
    return json.dumps({"format": 1, "tensors": found}).encode()


@contextmanager
def timed(row: dict[str, float], name: str) -> Iterator[None]:
    gc.collect()  # of what the benchmark itself has made
    began = time.thread_time()
    yield
    row[name] = time.thread_time() - began


if __name__ == "__main__":
    main()
