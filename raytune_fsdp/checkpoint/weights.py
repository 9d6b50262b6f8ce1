"""A committed checkpoint as a source of weights: to generate, to export, or to begin another run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.contents import MODEL
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.reading import read_index, read_rows, read_tensors
from raytune_fsdp.checkpoint.storage import Storage, StoredFile

_KEPT_FILES = 16  # far below the usual limit of 1024 handles, whatever the number of ranks that wrote


class CheckpointWeights:
    """The model's tensors in a checkpoint, read by one process. Needs no process group."""

    def __init__(self, found: CommittedCheckpoint, prefix: str = MODEL) -> None:
        self._found, self._prefix = found, prefix
        storage = storage_at(found.root)
        self._index = read_index(storage, found.name)
        if isinstance(storage, ObjectStorage):
            # An open file is no handle there, and every tensor is read from all files, always in the same order: if
            # one were closed, each would have to be fetched again for each tensor.
            files = max(1, len(self._index.files))
            self._storage = _KeptOpen(ObjectStorage(found.root, files), files)
        else:
            self._storage = _KeptOpen(storage, _KEPT_FILES)
        self._stored = {
            name.removeprefix(prefix): (entry.shape, entry.dtype)
            for name, entry in self._index.tensors.items()
            if name.startswith(prefix)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, (shape, _) in self._stored.items()}

    def where(self, name: str) -> str:
        return f"{name} in {self._found.path}"

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, (_, dtype) in self._stored.items()}

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = {self._prefix + n: torch.empty(self._stored[n][0], dtype=self._stored[n][1]) for n in names}
        read_tensors(tensors, self._storage, self._found.name, whole=False, index=self._index)
        return {name.removeprefix(self._prefix): tensor for name, tensor in tensors.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape, dtype = self._stored[name]
        rows = torch.empty((stop - start, *shape[1:]) if shape else (), dtype=dtype)
        if rows.numel():
            read_rows(rows, start, self._storage, self._found.name, self._prefix + name, self._index)
        return rows


class _KeptOpen:
    """Keeps the files that were read last open, since they are read tensor by tensor.

    In an object store every opening is a request, and what was read ahead would be fetched again.
    """

    def __init__(self, storage: Storage, most: int) -> None:
        self._storage, self._most = storage, most
        self._files: OrderedDict[tuple[str, str], tuple[ExitStack, StoredFile]] = OrderedDict()

    def where(self, name: str) -> str:
        return self._storage.where(name)

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[StoredFile]:
        if (name, file) not in self._files:
            stack = ExitStack()
            self._files[name, file] = stack, stack.enter_context(self._storage.open(name, file))
            if len(self._files) > self._most:
                self._files.popitem(last=False)[1][0].close()
        self._files.move_to_end((name, file))
        yield self._files[name, file][1]
