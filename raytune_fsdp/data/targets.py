"""What is computed of a micro-batch: its targets, and where its documents begin. Found on the host: no kernel waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raytune_fsdp.base.batch import IGNORE, Borders, PackedSample, Targets


def borders_of(position_ids: np.ndarray[Any, Any]) -> Borders:
    """Return the borders of documents, which begin where positions restart."""
    starts = np.append(np.flatnonzero(position_ids.reshape(-1) == 0), position_ids.size).astype(np.int32)
    lengths = np.diff(starts)
    return Borders(starts=torch.from_numpy(starts), longest=int(lengths.max()), lengths=tuple(lengths.tolist()))


def targets_of(
    labels: np.ndarray[Any, Any],
    source_ids: np.ndarray[Any, Any],
    borders: Borders,
    columns: np.ndarray[Any, Any] | None = None,
) -> Targets:
    """Return the targets of samples. The token at place i of a sample is predicted at i - 1, in the same document.

    `columns`: what a loss is told of each token's row, the tokens laid out one after another.
    """
    predicted = np.full_like(labels, IGNORE)
    predicted[:, :-1] = labels[:, 1:]
    places = np.flatnonzero(predicted != IGNORE)
    datasets = source_ids.reshape(-1)[places].astype(np.int64)
    arrays = (places, predicted.reshape(-1)[places], datasets)
    tensors = [torch.from_numpy(each.astype(np.int64)) for each in arrays]
    edges = np.searchsorted(places, borders.starts.numpy())
    counts = np.diff(edges)
    told = None if columns is None else columns[:, places[edges[:-1][counts > 0]]]
    return Targets(
        places=tensors[0],
        ids=tensors[1],
        datasets=tensors[2],
        by_dataset=tuple(np.bincount(datasets).tolist()),
        by_document=tuple(counts[counts > 0].tolist()),
        columns=() if told is None else tuple(map(tuple, told.T.tolist())),
    )


def columns_of(samples: Sequence[PackedSample]) -> np.ndarray[Any, Any] | None:
    """Return what a loss is told of each token's row, with the samples laid out one after another; None: nothing."""
    found = [sample.columns for sample in samples if sample.columns is not None]
    return np.concatenate(found, axis=1) if found else None
