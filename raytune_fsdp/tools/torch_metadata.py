"""Write `.metadata` into a committed checkpoint: the index by which torch.distributed.checkpoint reads it.

It is a pickle of every piece of every tensor. To make it while training goes on would keep Python's lock from training,
and few need it; so it is made of the index, when somebody asks for it.
"""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.errors import ResumeError, TransientError
from raytune_fsdp.base.untrusted import reason
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.index import Index
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.reading import read_index
from raytune_fsdp.checkpoint.storage import Storage

METADATA_FILE = ".metadata"


def write_torch_metadata(found: CommittedCheckpoint) -> bool:
    """Write `.metadata` of a committed checkpoint, over an older one; return False if an older version wrote it.

    One that the manifest does not list is anybody's, and torch would run what is in it.
    """
    storage = storage_at(found.root)
    try:
        if METADATA_FILE in read_manifest(storage, found.name).files:
            return False
        content = pickle.dumps(_metadata(storage, found, read_index(storage, found.name)))
        storage.put(found.name, METADATA_FILE, content)
    except OSError as error:
        raise TransientError(f"{found.path}: {METADATA_FILE} could not be written: {error}") from error
    except ValueError as error:
        raise ResumeError(f"{found.path} is not what was written: {reason(error)}; use another checkpoint") from error
    return True


def _metadata(storage: Storage, found: CommittedCheckpoint, index: Index) -> Metadata:
    tensors, entries = {}, {}
    for name, tensor in index.tensors.items():
        boxes = [(run.at(number)[1], run.shape) for run in tensor.runs for number in range(run.count)]
        chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in boxes]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for number, file in enumerate(index.files):
        if not file.table:
            raise ResumeError(f"{found.path} has lost its {METADATA_FILE}: an older version wrote it with the rest")
        beat()
        with storage.open(found.name, file.name) as source:
            for (name, offset), (_, first, length) in index.places_in(number, source).items():
                entries[MetadataIndex(name, torch.Size(offset))] = _StorageInfo(file.name, first, length)
    names = {name: (name,) for name in tensors}
    meta = StorageMeta(checkpoint_id=found.path)
    return Metadata(tensors, planner_data=names, storage_data=entries, storage_meta=meta, version="1.0.0")  # type: ignore[arg-type]
