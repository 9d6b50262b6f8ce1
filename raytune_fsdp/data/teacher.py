"""What a teacher predicts in documents: files that every run shares that learns from it, whatever its rows and epochs.

    <cache>/teacher/<key>/about.json                                 whose predictions they are, and in which form
    <cache>/teacher/<key>/parts/<digest>.topk                        predictions in some documents of a window
    <cache>/teacher/<key>/windows/<fingerprint>/e000-w00000012.json  which parts a window needs, and what is not kept

A document is known by its tokens and which of them are targets (data/reference.py:names_of). A part is named by the
digest of its content, and no longer changes; it is verified as a whole when a run begins that needs it, and each
document again when it is read. Files appear under their names complete or not at all. They are never removed to make
room; `raytune-fsdp data clean` removes what nobody has used for a while.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from raytune_fsdp.base.batch import MicroBatch, StepBatches, Taught
from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.base.errors import DamagedError, DataError, TransientError, first_line
from raytune_fsdp.base.untrusted import MIB, is_hollow, open_regular, parse_json, printable, read_json
from raytune_fsdp.data.cache import ABANDONED_SECONDS, ABOUT, TEACHER, TEMPORARY, put
from raytune_fsdp.data.reference import NAME, Known, Names, names_of
from raytune_fsdp.data.sources.handles import content_hash

FORMAT = 1
"""Version of the bytes of a part: a line of JSON; for each document a row of `_ROW`; for each, the ids of all its
targets' tokens (int32), their log-probabilities, and the logarithms of what is not kept (fp32 or fp64)."""

_ROW = np.dtype([("name", NAME), ("targets", "<u8"), ("digest", "<u8"), ("mass", "<f8"), ("largest", "<f8")])
"""`mass`: of all tokens that are not kept, summed over targets; `largest`: the largest of one target."""
ROW_BYTES = _ROW.itemsize
_FLOATS: Mapping[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp64": np.dtype("<f8")}
_ID = np.dtype("<i4")
_PART = re.compile(r"[0-9a-f]{32}")
_SUFFIX = ".topk"
_HEAD_BYTES = 4096
_HEAD = re.compile(rb'\{"documents": (\d{1,7}), ')
PART_BYTES, PART_DOCUMENTS, _MOST_DOCUMENTS = 256 * MIB, 1 << 18, 1 << 20
"""A part is written when it has this many bytes or documents; files with more documents than the last are none
of ours."""
_CERTAIN = 1e-3
"""No logarithm of a probability is larger, but for rounding."""
_OPEN_FILES = 64
_USED_SECONDS = 3600.0
"""So often a run that reads files says that they are used, for `data clean`."""

Table = np.ndarray[Any, np.dtype[np.void]]


def bytes_of_target(top_k: int, dtype: str) -> int:
    """Return how many bytes the predictions of one target take, in this type."""
    number = _FLOATS[dtype].itemsize
    return top_k * (_ID.itemsize + number) + number


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """In which form predictions are kept."""

    top_k: int
    """How many tokens of each target."""
    temperature: float
    dtype: str
    """Of probabilities: fp32 or fp64."""
    vocabulary: int
    """All ids are below this number."""

    @property
    def number(self) -> np.dtype[Any]:
        return _FLOATS[self.dtype]

    @property
    def target_bytes(self) -> int:
        """How many bytes the predictions of one target take."""
        return bytes_of_target(self.top_k, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What the teacher predicts in a document: for each target, see `base/batch.py:Taught`."""

    ids: np.ndarray[Any, Any]
    log_probabilities: np.ndarray[Any, Any]
    rest: np.ndarray[Any, Any]

    def to_bytes(self, form: Form) -> bytes:
        parts = (self.ids.astype(_ID), self.log_probabilities.astype(form.number), self.rest.astype(form.number))
        return b"".join(each.tobytes() for each in parts)

    @classmethod
    def from_bytes(cls, data: bytes, form: Form) -> Predictions:
        many = len(data) // form.target_bytes
        ids = np.frombuffer(data, _ID, many * form.top_k)
        floats = np.frombuffer(data, form.number, offset=ids.nbytes)
        shape = (many, form.top_k)
        return cls(ids=ids.reshape(shape), log_probabilities=floats[: ids.size].reshape(shape), rest=floats[ids.size :])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPart:
    """A file, and which documents' predictions are where in it."""

    name: str
    path: Path
    table: Table
    starts: np.ndarray[Any, np.dtype[np.int64]]
    """The first byte of each document, and the end of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """How much of the teacher's probability is not kept of the targets of a dataset."""

    targets: int = 0
    mass: float = 0.0
    """The sum over all of them."""
    largest: float = 0.0
    """Of one of them."""

    def __add__(self, other: Rest) -> Rest:
        return Rest(
            targets=self.targets + other.targets, mass=self.mass + other.mass, largest=max(self.largest, other.largest)
        )

    @property
    def mean(self) -> float:
        return self.mass / max(1, self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSaid:
    """Where the predictions of a window's documents are."""

    parts: tuple[str, ...]
    documents: int
    values: str
    """A digest of the documents and their predictions."""
    rest: Mapping[str, Rest]
    """By dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFiles:
    """The files of one teacher in one form."""

    directory: Path
    of: str
    """A digest of what decides predictions: the teacher's files, and how it computes."""
    form: Form
    tokenizer: str
    """A digest of the tokenizer."""
    model: str
    """What a config calls the teacher, for people."""

    @classmethod
    def within(cls, cache: Path, *, of: str, form: Form, tokenizer: str, model: str) -> TeacherFiles:
        """Return the files in a cache."""
        files = cls(directory=cache, of=of, form=form, tokenizer=tokenizer, model=model)
        return replace(files, directory=cache / TEACHER / files.key)

    @classmethod
    def kept(cls, directory: Path) -> TeacherFiles | None:
        """Return the files that a pass has left in a directory, which may be a copy; None: it has none."""
        try:
            said: Any = read_json(directory / ABOUT, limit=MIB)
            if not isinstance(said, dict) or TEACHER not in said:
                return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise DataError(f"{directory / ABOUT} cannot be read ({first_line(error)}): copy it again") from error
        numbers: dict[str, Any] = {key: said.get(key) for key in Form.__slots__}
        texts: dict[str, Any] = {key: said.get(key) for key in ("tokenizer", "model")}
        form = Form(**numbers)
        counts = all(isinstance(each, int) and 0 < each < 2**31 for each in (form.top_k, form.vocabulary))
        heat = isinstance(form.temperature, float) and 0 < form.temperature < math.inf
        named = all(isinstance(each, str) for each in (said[TEACHER], form.dtype, *texts.values()))
        sound = counts and heat and named and form.dtype in _FLOATS
        if said.get("format") != FORMAT or not sound:
            raise DataError(
                f"{directory / ABOUT} is not what this version writes there: copy it again, or name its model"
            )
        model = printable(texts["model"])[:200]
        return cls(directory=directory, of=said[TEACHER], form=form, tokenizer=texts["tokenizer"], model=model)

    @property
    def key(self) -> str:
        decides = [FORMAT, self.of, asdict(self.form), self.tokenizer]
        return xxhash.xxh3_128_hexdigest(json.dumps(decides, sort_keys=True).encode())

    def path(self, part: str) -> Path:
        return self.directory / "parts" / f"{part}{_SUFFIX}"

    def parts(self) -> list[str]:
        """Return the names of all parts that are there."""
        names = (path.name.removesuffix(_SUFFIX) for path in (self.directory / "parts").glob(f"*{_SUFFIX}"))
        return sorted(name for name in names if _PART.fullmatch(name))

    def tidy(self) -> None:
        """Remove what passes have left half written that were killed long ago; say whose files these are, if nobody
        can read that any more."""
        with suppress(OSError):
            if self.directory.is_dir() and not self._is_told():
                replace_at_once(self.directory / ABOUT, self._about.encode())
        for path in self.directory.rglob(f"*{TEMPORARY}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def write(self, names: Names, said: Sequence[bytes], masses: Sequence[Rest]) -> KeptPart:
        """Keep what the teacher predicts in these documents. Return the part."""
        table = np.empty(len(names), dtype=_ROW)
        for row, (name, data, rest) in enumerate(zip(names, said, masses, strict=True)):
            table[row] = (name, rest.targets, xxhash.xxh3_64_intdigest(data), rest.mass, rest.largest)
        head = self._head(len(names)) + b"\n" + table.tobytes()
        hashed = xxhash.xxh3_128(head)
        for data in said:
            hashed.update(data)
        name, starts = hashed.hexdigest(), np.cumsum([len(head), *map(len, said)], dtype=np.int64)
        self._put(self.path(name), head, *said)
        return KeptPart(name=name, path=self.path(name), table=table, starts=starts)

    def open(self, part: str) -> KeptPart | None:
        """Return a part after verifying all of it; None if it is missing, damaged, renamed or another teacher's."""
        try:
            path = self.path(part)
            with os.fdopen(open_regular(path), "rb") as file:
                found = self._opened(file.fileno(), part, path)
        except (OSError, ValueError):
            return None
        with suppress(OSError):
            os.utime(path)  # `data clean` removes what nobody has used for a while
        return found

    def _opened(self, handle: int, part: str, path: Path) -> KeptPart | None:
        size = os.fstat(handle).st_size
        head, end, _ = os.pread(handle, _HEAD_BYTES, 0).partition(b"\n")
        counted = _HEAD.match(head) if end else None
        documents = int(counted[1]) if counted else 0
        if not 0 < documents <= _MOST_DOCUMENTS or head != self._head(documents):
            return None
        first = len(head) + 1
        data = _read(handle, documents * _ROW.itemsize, first)
        if len(data) != documents * _ROW.itemsize:
            return None
        table = np.frombuffer(data, dtype=_ROW)
        if not _sound(table, size // self.form.target_bytes):
            return None
        sizes = table["targets"].astype(np.int64) * self.form.target_bytes
        starts = np.concatenate([[0], np.cumsum(sizes)]) + first + len(data)
        if starts[-1] != size or is_hollow(path, os.fstat(handle)) or content_hash(handle, lambda _: beat()) != part:
            return None
        return KeptPart(name=part, path=path, table=table, starts=starts)

    def read_window(self, fingerprint: str, epoch: int, k: int) -> WindowSaid | None:
        """Return what is known of a window of these; None if its file is missing, damaged or another's."""
        try:
            found = read_json(self._window(fingerprint, epoch, k), limit=16 * MIB)
            text = found["said"].encode()
            said = parse_json(text, doubles=True)
            if found["digest"] != xxhash.xxh3_128_hexdigest(text):
                return None
            if [said[key] for key in ("format", "key", "place")] != [FORMAT, self.key, [fingerprint, epoch, k]]:
                return None
            if not all(_PART.fullmatch(part) for part in said["parts"]):
                return None
            rest = {
                printable(name): Rest(
                    targets=int(each["targets"]), mass=float(each["mass"]), largest=float(each["largest"])
                )
                for name, each in said["rest"].items()
            }
            return WindowSaid(
                parts=tuple(said["parts"]), documents=int(said["documents"]), values=str(said["values"]), rest=rest
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None

    def write_window(self, fingerprint: str, epoch: int, k: int, window: WindowSaid) -> None:
        said = json.dumps(
            {
                **asdict(window), "format": FORMAT, "key": self.key, "place": [fingerprint, epoch, k],
            }
        )  # fmt: skip
        found = {"said": said, "digest": xxhash.xxh3_128_hexdigest(said.encode())}
        self._put(self._window(fingerprint, epoch, k), json.dumps(found).encode())

    @staticmethod
    def window_name(fingerprint: str, epoch: int, k: int) -> str:
        """Return the name of a window, by which checkpoints know it."""
        return f"{fingerprint}/e{epoch:03d}-w{k:08d}"

    def _window(self, fingerprint: str, epoch: int, k: int) -> Path:
        return self.directory / "windows" / f"{self.window_name(fingerprint, epoch, k)}.json"

    def _head(self, documents: int) -> bytes:
        """Return what a part says about itself: it may have been copied from elsewhere."""
        said = {"format": FORMAT, "key": self.key, "documents": documents}
        return json.dumps(said, sort_keys=True).encode()

    def _is_told(self) -> bool:
        with suppress(DataError):
            kept = self.kept(self.directory)
            return kept is not None and kept.key == self.key
        return False

    @property
    def _about(self) -> str:
        said = {
            "format": FORMAT, TEACHER: self.of, "model": self.model, "tokenizer": self.tokenizer, **asdict(self.form),
        }  # fmt: skip
        return json.dumps(said, indent=1)

    def _put(self, path: Path, *content: bytes) -> None:
        try:
            put(self.directory, self._about, path, *content)
        except OSError as error:
            raise DataError(
                f"{self.directory} cannot take the predictions of the teacher ({error.strerror}); free space, lower "
                "teacher.top_k, or set data.cache.path to another directory"
            ) from error


def _sound(table: Table, most: int) -> bool:
    """Return whether what a table says can be true. `most`: the most targets that its file has room for."""
    targets, mass, largest = table["targets"], table["mass"], table["largest"]
    inside = (targets > 0) & (mass >= 0) & (largest >= 0) & (largest <= 1.001) & (mass <= 1.001 * targets)
    return bool(inside.all()) and float(targets.astype(np.float64).sum()) <= most


def _read(handle: int, many: int, place: int) -> bytes:
    """Return so many bytes of a file; fewer at its end. The system returns 2 GiB at most."""
    found: list[bytes] = []
    while many and (data := os.pread(handle, many, place)):
        found.append(data)
        many, place = many - len(data), place + len(data)
    return found[0] if len(found) == 1 else b"".join(found)


def rest_of(rest: np.ndarray[Any, Any]) -> Rest:
    """Return how much is not kept of a document's targets."""
    masses = np.exp(rest.astype(np.float64))
    return Rest(targets=len(masses), mass=float(masses.sum()), largest=float(masses.max()))


@dataclass(slots=True)
class Lessons:
    """All predictions that are known, by document, and where they are. Of two in one document, the first counts."""

    files: TeacherFiles
    parts: list[KeptPart] = field(default_factory=list)
    known: Known = field(default_factory=lambda: Known(np.empty(0, dtype=NAME), np.empty(0, dtype=np.int64)))
    """Documents by name, each with its number among all documents of all parts."""
    _first: list[int] = field(default_factory=lambda: [0])
    """The number of each part's first document, and how many all parts have."""
    _handles: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _used: float = -math.inf

    def add(self, parts: Iterable[KeptPart]) -> None:
        """Add what is in these parts; one that is known already adds nothing."""
        have = {part.name for part in self.parts}
        more = [part for name, part in {part.name: part for part in parts}.items() if name not in have]
        if not more:
            return
        names, rows = np.unique(np.concatenate([part.table["name"] for part in more]), return_index=True)
        new = ~self.known.has(names)
        self.known = self.known.with_new(names[new], rows[new] + self._first[-1])
        for part in more:
            self.parts.append(part)
            self._first.append(self._first[-1] + len(part.table))

    def add_documents(self, parts: Sequence[KeptPart], names: Names) -> None:
        """Add what these parts say of these documents, and not of others."""
        if not parts:
            return
        for part in parts:
            if all(part.name != each.name for each in self.parts):
                self.parts.append(part)
                self._first.append(self._first[-1] + len(part.table))
        first = {part.name: number for part, number in zip(self.parts, self._first, strict=False)}
        numbers = np.concatenate([np.arange(len(part.table)) + first[part.name] for part in parts])
        found, rows = np.unique(np.concatenate([part.table["name"] for part in parts]), return_index=True)
        new = Known.of([(names, np.zeros(len(names)))]).has(found) & ~self.known.has(found)
        self.known = self.known.with_new(found[new], numbers[rows][new])

    def place(self, number: int) -> tuple[KeptPart, int]:
        """Return the part and the row in it of a document."""
        at = bisect_right(self._first, number) - 1
        return self.parts[at], number - self._first[at]

    def places(self, names: Names) -> list[tuple[KeptPart, int]]:
        """Return the part and the row in it of each of these documents. Raise DamagedError if one is not known."""
        if not self.known.has(names).all():
            raise DamagedError(
                f"{self.files.directory} has no predictions in a document of this run, which nobody asked for when the "
                "run started: the prepared data was changed meanwhile; start the same command again"
            )
        return [self.place(number) for number in self.known.find(names).tolist()]

    def read(self, names: Names) -> Predictions:
        """Return what is predicted in these documents, one after another, each verified."""
        form = self.files.form
        found = [Predictions.from_bytes(self._bytes(part, row), form) for part, row in self.places(names)]
        empty = Predictions.from_bytes(b"", form)
        joined = Predictions(
            **{key: np.concatenate([getattr(each, key) for each in (empty, *found)]) for key in Predictions.__slots__}
        )
        inside = not joined.ids.size or (joined.ids.min() >= 0 and joined.ids.max() < form.vocabulary)
        logs, rest = joined.log_probabilities, joined.rest  # the rest may have no probability; what is no number fails
        if not inside or not (np.isfinite(logs) & (logs <= _CERTAIN)).all() or not (rest <= _CERTAIN).all():
            raise DamagedError(
                f"{self.files.directory}: a document has predictions of tokens that do not exist, or that are no "
                "probabilities: no teacher has made it; remove the directory"
            )
        return joined

    def _bytes(self, part: KeptPart, row: int) -> bytes:
        """Return the bytes of a document."""
        first, end = int(part.starts[row]), int(part.starts[row + 1])
        path = part.path
        try:
            data = _read(self._handle(path, part.name), end - first, first)
        except (OSError, ValueError) as error:
            raise TransientError(f"{path} cannot be read: {first_line(error)}") from error
        if xxhash.xxh3_64_intdigest(data) != int(part.table["digest"][row]):
            raise DamagedError(
                f"{path} has been damaged since the run started: the teacher's predictions in a document are not "
                "what was written; start the same command again, and they are verified and computed again"
            )
        return data

    def _handle(self, path: Path, name: str) -> int:
        if (now := time.monotonic()) - self._used > _USED_SECONDS:
            self._used = now
            with suppress(OSError):
                os.utime(path)
        if name in self._handles:
            self._handles.move_to_end(name)
        else:
            if len(self._handles) >= _OPEN_FILES:
                os.close(self._handles.popitem(last=False)[1])
            self._handles[name] = open_regular(path)
        return self._handles[name]

    def close(self) -> None:
        """Close its files; reading opens them again."""
        while self._handles:
            with suppress(OSError):
                os.close(self._handles.popitem()[1])

    def told(self, batch: MicroBatch) -> MicroBatch:
        """Return a whole micro-batch whose targets have what the teacher predicts in their place. It is on the host."""
        found = self.read(names_of(batch, grouped=False))
        if len(found.rest) != len(batch.targets.ids):
            raise DamagedError(
                f"{self.files.directory}: a document has predictions for other tokens than its own: no teacher has "
                "made them; remove the directory"
            )
        taught = Taught(
            ids=torch.from_numpy(found.ids), log_probabilities=torch.from_numpy(found.log_probabilities),
            rest=torch.from_numpy(found.rest),
        )  # fmt: skip
        return replace(batch, targets=replace(batch.targets, teacher=taught))

    def steps(self, steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
        """Yield steps whose micro-batches are told. They are whole, and on the host.

        What a step needs is read by a thread while the step before it is trained.
        """
        source, failure = iter(steps), None
        coming: Future[StepBatches] | None = None
        with closing(self), ThreadPoolExecutor(max_workers=1, thread_name_prefix="teacher") as ahead:
            while failure is None:
                following = None
                try:
                    following = ahead.submit(self._told, next(source))
                except Exception as error:  # raised when training comes to that step, and not before
                    failure = error
                if coming is not None:
                    yield coming.result()
                coming = following
        if not isinstance(failure, StopIteration):
            raise failure

    def _told(self, step: StepBatches) -> StepBatches:
        return replace(step, micro_batches=tuple(map(self.told, step.micro_batches)))


def digest_of_window(lessons: Lessons, names: Names) -> str:
    """Return one digest of these documents, in whatever order, and of what is predicted in them."""
    hashed = xxhash.xxh3_64()
    every = np.unique(names)
    for name, (part, row) in zip(every, lessons.places(every), strict=True):
        hashed.update(name.tobytes() + part.table["digest"][row].tobytes())
    return hashed.hexdigest()
