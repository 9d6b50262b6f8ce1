"""The index of a checkpoint: however ranks have cut tensors, any other ranks read what they need, and little else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import load

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.catalogue import as_checkpoint, verify
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.reading import read_index, read_rows
from raytune_fsdp.checkpoint.storage import PosixStorage, StoredFile
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.checkpoint.writing import arrange
from raytune_fsdp.model.pieces.pieces import range_of
from raytune_fsdp.tools.torch_metadata import write_torch_metadata
from tests.checkpoints import rows_of_ranks, tensors_in, write_as_ranks

OLDER = Path(__file__).parents[1] / "fixtures" / "aae7294" / "runs" / "steps" / "checkpoints" / "step-00000006.a1"
NAME = "step-00000001.a1"
TENSORS = {
    "model.words": torch.arange(61 * 8, dtype=torch.float32).view(61, 8),
    "model.norm": torch.arange(3, dtype=torch.bfloat16),
    "model.experts": torch.arange(4 * 6 * 5, dtype=torch.int64).view(4, 6, 5),
    "optim.step": torch.tensor(7.0),
    "optim.nothing": torch.zeros(0, 4),
    "optim.large": torch.arange(20_000, dtype=torch.float64).view(-1, 2),
}


def boxes_of(data: int, cut: int, copies: int) -> list[list[list[int]]]:
    """What each of data x cut x copies ranks has: rows, those that share a layer some columns, and copies the same."""
    found = []
    for rank in range(data * cut * copies):
        at, part = rank % (data * cut) // cut, rank % cut
        boxes = []
        for name, tensor in TENSORS.items():
            rows, columns = (0, tensor.shape[0] if tensor.ndim else 1), (0, tensor.shape[1] if tensor.ndim > 1 else 1)
            if name == "model.words":  # by columns
                columns = range_of(8, cut, part)
            if name == "optim.large":  # by rows, each of them by rows again
                rows = range_of(10_000, cut, part)
            if tensor.ndim:
                start, stop = range_of(rows[1] - rows[0], data, at)
                rows = rows[0] + start, rows[0] + stop
            boxes.append([rows[0], rows[1] - rows[0], columns[0], columns[1] - columns[0]])
        found.append(boxes)
    return found


@pytest.mark.parametrize(
    ("data", "cut", "copies"), [(1, 1, 1), (2, 1, 1), (5, 1, 1), (7, 1, 1), (1, 1, 3), (3, 2, 1), (4, 1, 2), (2, 4, 2)]
)
def test_what_any_ranks_have_written_is_read_in_any_parts(tmp_path: Path, data: int, cut: int, copies: int) -> None:
    found = write_as_ranks(tmp_path, NAME, TENSORS, boxes_of(data, cut, copies))
    assert verify(found, hashes=True) is None
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in tensors_in(found).items())
    storage, chance = PosixStorage(str(tmp_path)), random.Random(data)
    index = read_index(storage, NAME)
    for name, tensor in TENSORS.items():
        if tensor.numel() and tensor.ndim:
            start, stop = sorted(chance.sample(range(len(tensor) + 1), 2))
            target = torch.empty_like(tensor[start:stop])
            read_rows(target, start, storage, NAME, name, index)
            assert torch.equal(target, tensor[start:stop])
    # The same by torch's own reader.
    Path(found.path, ".metadata").write_bytes(b"somebody else's")
    assert write_torch_metadata(found), "anew"
    theirs = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    load(theirs, checkpoint_id=found.path, no_dist=True)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in theirs.items())


class Counted(PosixStorage):
    """Which bytes of which files are read."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.read_of: dict[str, int] = {}

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[StoredFile]:
        with super().open(name, file) as source:
            yield _CountedFile(source, self, file)


class _CountedFile:
    def __init__(self, source: StoredFile, storage: Counted, file: str) -> None:
        self._source, self._storage, self._file = source, storage, file

    def read_into(self, offset: int, target: memoryview) -> None:
        self._storage.read_of[self._file] = self._storage.read_of.get(self._file, 0) + len(target)
        self._source.read_into(offset, target)


def test_what_a_rank_reads_does_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    """Its rows at the same number of ranks: two files, its own and the first, which has what all ranks need."""
    tensors = {f"model.{number}": torch.randn(256, 4) for number in range(8)} | {"optim.step": torch.tensor(1.0)}
    lengths, read = [], []
    for ranks in (4, 32):
        found = write_as_ranks(tmp_path / str(ranks), NAME, tensors, rows_of_ranks(tensors, ranks))
        storage = Counted(str(tmp_path / str(ranks)))
        index = read_index(storage, NAME)
        rows = 256 // ranks
        for name, tensor in tensors.items():
            target = torch.empty_like(tensor[rows : 2 * rows] if tensor.ndim else tensor)
            read_rows(target, rows, storage, NAME, name, index)
            assert torch.equal(target, tensor[rows : 2 * rows] if tensor.ndim else tensor)
        assert storage.read_of.keys() == {"__0_1.distcp", "__1_1.distcp"}
        numbers = sum(tensor[rows : 2 * rows].nbytes if tensor.ndim else tensor.nbytes for tensor in tensors.values())
        read.append(sum(storage.read_of.values()) - numbers)
        lengths.append(Path(found.path, "tensors.json").stat().st_size - 58 * ranks)  # 58: name and table of a file
    assert abs(read[0] - read[1]) < 100 and abs(lengths[0] - lengths[1]) < 100, (read, lengths)


def test_the_work_is_shared_out_evenly_and_the_index_stays_short() -> None:
    """Of tensors that many ranks hold."""
    shapes = {f"model.{number}": (torch.float32, (1024, 1024)) for number in range(64)}
    replicas = np.tile([0, 1024, 0, 1024], (8, 64, 1))
    twice = np.array([[[128 * rank, 128, 0, 1024]] * 64 for rank in range(8)] * 2)
    for boxes, times, each in ((replicas, 1, 8), (twice, 8, 32)):
        index, mine = arrange(shapes, boxes.astype(np.int64))
        assert sorted(number for numbers in mine for number in numbers) == sorted([*range(64)] * times)
        assert {len(numbers) for numbers in mine} == {each}
        assert index.count('"count"') == 64


def test_ranks_that_leave_a_hole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has pieces of model\.a that do not add up to the whole tensor"):
        arrange({"model.a": (torch.float32, (4, 2))}, np.array([[[0, 2, 0, 2]], [[3, 1, 0, 2]]]))


def test_a_table_that_was_changed_is_named(tmp_path: Path) -> None:
    found = write_as_ranks(tmp_path, NAME, TENSORS, rows_of_ranks(TENSORS, 2))
    file = Path(found.path, "__1_1.distcp")
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"model.norm": [', b'"model.norn": ['))
    with pytest.raises(
        ResumeError, match=r"__1_1\.distcp is not what was written \(it has another table at its end than was written"
    ):
        tensors_in(found)
    file.write_bytes(content.replace(b'"model.norm": [', b'"model.norm": ]'))
    with pytest.raises(ResumeError, match=r"__1_1\.distcp is not what was written \("):
        tensors_in(found)


def test_in_a_store_the_file_of_each_of_forty_ranks_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export reads one tensor after the other, each from all files."""
    tensors = {f"model.{name}": torch.randn(80, 3) for name in "abc"}
    found = write_as_ranks(tmp_path, NAME, tensors, rows_of_ranks(tensors, 40))
    opened: list[str] = []
    really = ObjectStorage.open

    def opening(storage: ObjectStorage, name: str, file: str) -> AbstractContextManager[StoredFile]:
        opened.append(file)
        return really(storage, name, file)

    monkeypatch.setattr(ObjectStorage, "open", opening)
    weights = CheckpointWeights(replace(found, root=f"file://{tmp_path}"))
    for name in "abc":
        assert torch.equal(weights.read_all([name])[name], tensors[f"model.{name}"])
    assert sorted(opened) == sorted(f"__{rank}_1.distcp" for rank in range(40))
    for files, ahead in ((1, 4 << 20), (512, 1 << 20), (100_000, 1 << 16)):
        assert ObjectStorage("s3://bucket/run", files)._ahead == ahead, "as far as that goes, within 512 MiB"


def test_a_checkpoint_of_an_older_version_is_read_as_before() -> None:
    """Its index has every piece by itself, and its .metadata was written with it."""
    older = as_checkpoint(str(OLDER))
    assert older is not None
    assert verify(older, hashes=True) is None and not write_torch_metadata(older)
    ours = tensors_in(older)
    theirs = {name: torch.empty_like(tensor) for name, tensor in ours.items()}
    load(theirs, checkpoint_id=older.path, no_dist=True)
    assert ours and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
