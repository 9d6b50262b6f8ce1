"""The log-probabilities that a reference gives to documents: files beside the windows, for every run that needs them.

    <cache>/reference/<key>/about.json             which reference they are of, for people
    <cache>/reference/<key>/e000-w00000012.values  those of the documents that window 12 of epoch 0 is the first to have

A document is known by its tokens, which of them count, and nothing else: where its row lies, in which epoch and on how
many ranks it is trained on changes neither its name here nor its value. Files appear under their names complete or not
at all, say where they belong, and end with a digest. They are never removed to make room, as they cost a pass over the
data with the whole model; `raytune-fsdp data clean` removes those that nobody has used for a while.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from raytune_fsdp.base.batch import GROUP_COLUMNS, MicroBatch, StepBatches
from raytune_fsdp.base.errors import DamagedError, DataError
from raytune_fsdp.data.cache import REFERENCE, put
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.identity import REFERENCE_ALSO, REFERENCE_OF, REFERENCE_VALUES

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the bytes: a line of JSON, 16 bytes a document (its name), 8 bytes a document (fp64), their xxh3_128."""

NAME = np.dtype([("first", "<u8"), ("second", "<u8")])
_DIGEST_BYTES = 16
_SKIPPED = GROUP_COLUMNS.index("skipped")

Names = np.ndarray[Any, np.dtype[np.void]]
Values = np.ndarray[Any, np.dtype[Any]]


def names_of(batch: MicroBatch, *, grouped: bool = True) -> Names:
    """Return the names of a whole micro-batch's documents that have targets, in order. Its tensors are on the host.

    `grouped`: what the loss is told of a document is `GROUP_COLUMNS`.
    """
    targets = batch.targets
    ids, labels = (each.reshape(-1).numpy().astype("<i4") for each in (batch.input_ids, batch.labels))
    starts = batch.borders.starts.numpy()
    edges = np.searchsorted(targets.places.numpy(), starts)
    found = np.empty(len(targets.by_document), dtype=NAME)
    for number, place in enumerate(np.flatnonzero(np.diff(edges))):
        here = slice(starts[place], starts[place + 1])
        # How many of its first targets do not count is part of the name: with sft.over=all, two documents may have the
        # same tokens and the same targets, and answers that begin at different places.
        skipped = int(targets.columns[number][_SKIPPED]) if grouped and targets.columns else 0
        said = np.array([skipped], dtype="<i4")
        digest = xxhash.xxh3_128_digest(said.tobytes() + ids[here].tobytes() + labels[here].tobytes())
        found[number] = tuple(np.frombuffer(digest, dtype="<u8"))
    return found


@dataclass(frozen=True, slots=True)
class Known:
    """The values of documents by their names, sorted."""

    names: Names
    values: Values

    @classmethod
    def of(cls, parts: Iterable[tuple[Names, Values]]) -> Known:
        """Return what is in these parts. Of a document that is in two, the value of the first part counts."""
        every = list(parts) or [(np.empty(0, dtype=NAME), np.empty(0))]
        found, first = np.unique(np.concatenate([names for names, _ in every]), return_index=True)
        return cls(found, np.concatenate([values for _, values in every])[first])

    def with_new(self, names: Names, values: Values) -> Known:
        """Return these and others, none of which is known; theirs are sorted, too."""
        places = np.searchsorted(self.names, names)
        return Known(np.insert(self.names, places, names), np.insert(self.values, places, values))

    def has(self, names: Names) -> Any:
        """Return for each of these documents whether its value is known."""
        if not len(self.names):
            return np.zeros(len(names), dtype=bool)
        places = np.searchsorted(self.names, names)
        return self.names[np.minimum(places, len(self.names) - 1)] == names  # isin would sort all, for each micro-batch

    def find(self, names: Names) -> Values:
        """Return the values of documents. Raise DamagedError if one is not known."""
        if not self.has(names).all():
            raise DamagedError(
                "the reference has no log-probability for a document of this run, which it was not asked about when "
                "the run started: the prepared data was changed meanwhile; start the same command again"
            )
        return self.values[np.searchsorted(self.names, names)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFiles:
    """The files of one reference for the windows of one fingerprint."""

    root: Path
    """The cache."""
    key: str
    about: Mapping[str, Any]

    @classmethod
    def of(cls, windows: Windows, reference: Mapping[str, Any]) -> ReferenceFiles:
        """Return the files for these windows. `reference`: everything that decides the values besides."""
        decides = json.dumps([FORMAT, windows.fingerprint, reference], sort_keys=True)
        about = {"datasets": windows.names, "fingerprint": windows.fingerprint, "reference": reference}
        return cls(root=windows.cache.root, key=xxhash.xxh3_128_hexdigest(decides.encode()), about=about)

    @property
    def directory(self) -> Path:
        return self.root / REFERENCE / self.key

    def read(self, epoch: int, k: int) -> tuple[Names, Values] | None:
        """Return what is known of a window; None if its file is missing, damaged or another one's."""
        try:
            data = self._path(epoch, k).read_bytes()
        except OSError:
            return None
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        head, end, rest = body.partition(b"\n")
        if xxhash.xxh3_128_digest(body) != digest or not end or len(rest) % (NAME.itemsize + 8):
            return None
        many = len(rest) // (NAME.itemsize + 8)
        if head != self._head(epoch, k, many):
            return None
        with suppress(OSError):
            os.utime(self._path(epoch, k))  # `data clean` removes what nobody has used for a while
        names = np.frombuffer(rest, dtype=NAME, count=many)
        values = np.frombuffer(rest, dtype="<f8", offset=names.nbytes).astype(np.float64)
        return names, values

    def write(self, epoch: int, k: int, names: Names, values: Values) -> None:
        """Keep what a window is the first to have."""
        body = self._head(epoch, k, len(names)) + b"\n" + names.tobytes() + values.astype("<f8").tobytes()
        about = json.dumps(self.about, indent=1)
        try:
            put(self.directory, about, self._path(epoch, k), body, xxhash.xxh3_128_digest(body))
        except OSError as error:
            raise DataError(
                f"{self.directory} cannot take the log-probabilities of the reference ({error.strerror}); free "
                "space, or set data.cache.path to another directory"
            ) from error

    def name(self, epoch: int, k: int) -> str:
        """Return the name of a window's file, by which checkpoints know it."""
        return f"{self.key}/{self._path(epoch, k).stem}"

    def _head(self, epoch: int, k: int, documents: int) -> bytes:
        """Return what a file says about itself: it may have been copied or renamed by hand."""
        said = {"format": FORMAT, "key": self.key, "epoch": epoch, "window": k, "documents": documents}
        return json.dumps(said, sort_keys=True).encode()

    def _path(self, epoch: int, k: int) -> Path:
        return self.directory / f"e{epoch:03d}-w{k:08d}.values"


def digest_of_values(names: Names, values: Values) -> str:
    """Return one digest of the documents of a window and their values."""
    return xxhash.xxh3_64_hexdigest(names.tobytes() + values.astype("<f8").tobytes())


@dataclass(slots=True)
class Given:
    """What the reference gives to each document of a run, of its training and its evaluations."""

    known: Known

    def told(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch whose loss is told the values of its documents, after what it is told of their rows."""
        if not batch.targets.columns:
            return batch
        values = self.known.find(names_of(batch)).tolist()
        columns = tuple((*told, value) for told, value in zip(batch.targets.columns, values, strict=True))
        return replace(batch, targets=replace(batch.targets, columns=columns))

    def steps(self, steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
        """Yield steps whose micro-batches are told. They are whole, and on the host."""
        for step in steps:
            yield replace(step, micro_batches=tuple(map(self.told, step.micro_batches)))


def given_of(identity: Mapping[str, Any], datasets: Mapping[str, Windows]) -> Given | None:
    """Return what the reference has said of these datasets' documents, by the identity that a checkpoint has.

    None: not all of it is kept, or there is no reference.
    """
    found: list[tuple[Names, Values]] = []
    of = identity.get(REFERENCE_OF)
    every = [of, *(identity.get(REFERENCE_ALSO) or ())]
    for name, windows in datasets.items():
        if of is None or windows.kind is None:
            continue
        files = [ReferenceFiles.of(windows, {"of": each}) for each in every]
        for k in range(windows.count(0)):
            part = _used(files, k, identity.get(REFERENCE_VALUES) or {})
            if part is None:
                logger.warning(
                    "what the reference says of %s is not kept in %s, so only log-probabilities are measured: the "
                    "run's own evaluations compute it", name, files[0].directory,
                )  # fmt: skip
                return None
            found.append(part)
    return Given(Known.of(found)) if found else None


def _used(every: Sequence[ReferenceFiles], k: int, values: Mapping[str, str]) -> tuple[Names, Values] | None:
    """Return what a run knows of a window of an evaluation, in whichever of these files its attempts have kept it.

    `values`: the digests of all that it has used, by file.
    """
    wanted = next((values[files.name(0, k)] for files in every if files.name(0, k) in values), None)
    parts = (files.read(0, k) for files in every)
    return next((part for part in parts if part is not None and wanted in (None, digest_of_values(*part))), None)
