"""Compute the digest of tensors: equal for the same numbers, however many ranks wrote them and into which files.

A manifest has the hashes of files, which depend on who wrote which rows. Here the sha256 of each row is a leaf of a
tree: 1,024 leaves make a node, the nodes make the digest of a tensor, with its name, type and shape, and these make the
root. So ranks that have some rows of a tensor could each compute their part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from raytune_fsdp.base.beat import beat
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.contents import MODEL
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.export.adapter import WEIGHTS_FILE
from raytune_fsdp.model.weights.source import FileWeights, Weights

_NODE = 1024
"""Rows of a node."""

_AT_ONCE = 64 << 20
"""Bytes that are read at once, unless a row has more."""

STATE = "state"
"""The name under which the state of a checkpoint counts, next to its tensors."""


def digests_of_checkpoint(found: CommittedCheckpoint) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint, and that of the state which decides what follows."""
    weights = CheckpointWeights(found, "")
    return {**digests(weights), STATE: _digest_of_state(read_state(found))}


def digests_of_model(directory: Path) -> dict[str, str]:
    """Return the digest of each tensor in a model directory's files."""
    files = find_weights(directory, "adapter_model" if (directory / WEIGHTS_FILE).is_file() else "model")
    return digests(FileWeights(files, {key: key for key in files.file_of}))


def root(digests: Mapping[str, str]) -> str:
    """Return the digest of all tensors together."""
    return _sha256(b"".join(bytes.fromhex(digests[name]) for name in sorted(digests))).hex()


def weights_among(digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of a checkpoint's weights, without those of the optimizer's tensors and of the state."""
    return {name: each for name, each in digests.items() if name.startswith(MODEL)}


def digests(weights: Weights) -> dict[str, str]:
    """Return the digest of each of these tensors."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return {name: _digest(weights, name, shape, threads) for name, shape in sorted(weights.shapes().items())}


def _digest(weights: Weights, name: str, shape: tuple[int, ...], threads: ThreadPoolExecutor) -> str:
    dtype = weights.read(name, 0, 0 if shape else 1).dtype
    head = json.dumps([name, str(dtype).removeprefix("torch."), list(shape)])
    leaves = [leaf for part in _rows(weights, name, shape, dtype) for leaf in threads.map(_sha256, part)]
    nodes = [_sha256(b"".join(leaves[first : first + _NODE])) for first in range(0, len(leaves), _NODE)]
    return _sha256(head.encode() + b"".join(nodes)).hex()


def _rows(weights: Weights, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[list[memoryview]]:
    """Yield the bytes of each row, some rows at a time. A tensor without dimensions is one row."""
    rows, size = (shape[0], math.prod(shape[1:]) * dtype.itemsize) if shape else (1, dtype.itemsize)
    at_once = max(1, _AT_ONCE // max(1, size))
    for first in range(0, rows, at_once):
        beat()
        some = weights.read(name, first, min(rows, first + at_once)).contiguous()
        content = some.reshape(-1).view(torch.uint8).numpy().data
        yield [content[start : start + size] for start in range(0, max(1, len(content)), max(1, size))]


def _digest_of_state(state: RunState) -> str:
    decides = {
        "step": state.step,
        "samples": state.samples,
        "cursor": asdict(state.cursor),
        "skipped_in_row": state.skipped_in_row,
        "loss_scale": state.loss_scale,
        "good_steps": state.good_steps,
    }
    return _sha256(json.dumps(decides, sort_keys=True).encode()).hex()


def _sha256(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()
