"""What became of the rows: the counts of a window, and of all the data before training."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any


@dataclass(slots=True, kw_only=True)
class DatasetCount:
    """What became of a dataset's rows."""

    rows: int = 0
    documents: int = 0
    """Documents that rows became: one for each, but for rows that became a group of several."""
    tokens: int = 0
    target_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that did not become a document, by reason."""
    truncated: int = 0
    """Documents that were cut off at `seq_len`."""
    cut: int = 0
    """Additional pieces that documents were cut into, to continue in another sample."""
    without_targets: int = 0
    """Pieces of cut documents in which no token is trained on. They take room and teach nothing."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Documents (before truncation) by length: key n counts those with 2**(n/4) to 2**((n+1)/4) tokens. Groups by the
    sum of their documents, which must fit."""
    groups: int = 0
    """Rows that became a group: a pair, or a judged answer."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DatasetCount:
        return cls(**{**values, "lengths": {int(n): many for n, many in values["lengths"].items()}})

    def add(self, other: DatasetCount) -> None:
        for name, more in asdict(other).items():
            own = getattr(self, name)
            if isinstance(more, dict):
                for key, count in more.items():
                    own[key] = own.get(key, 0) + count
            else:
                setattr(self, name, own + more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row left out because of `data.bad_rows=skip`."""

    where: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsOfSteps:
    """How many groups (pairs, or judged answers) a step has, over the steps of an epoch."""

    mean: float
    least: int | None = None
    """None: not all rows were counted."""
    most: int | None = None

    @property
    def words(self) -> str:
        return f"{self.mean:,.1f} a step" + ("" if self.least is None else f", {self.least:,} to {self.most:,}")


def _written(values: dict[str, Any], *later: str) -> str:
    """Return counts as a file has them: of datasets only what is not 0, where older versions did not count it."""
    for count in values["datasets"]:
        for key in later:
            if not count[key]:
                del count[key]
    return json.dumps(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCounts:
    """The counts of one window."""

    samples: int
    datasets: tuple[DatasetCount, ...]
    skipped: tuple[SkippedRow, ...] = ()

    def to_json(self) -> str:
        return _written(asdict(self), "without_targets", "groups")

    @classmethod
    def from_json(cls, text: str | bytes) -> WindowCounts:
        values = json.loads(text)
        return cls(
            samples=values["samples"],
            datasets=tuple(map(DatasetCount.from_dict, values["datasets"])),
            skipped=tuple(SkippedRow(**row) for row in values["skipped"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """The counts of all the data, taken before training."""

    seq_len: int
    epochs: tuple[int, ...]
    """Packed samples of each counted epoch; only one is counted if all epochs have the same rows."""
    windows: int = 0
    names: tuple[str, ...] = ()
    datasets: tuple[DatasetCount, ...] = ()
    """What became of the rows of each dataset, over all counted epochs."""
    skipped: tuple[SkippedRow, ...] = ()
    """Rows that were left out, at most the first 10,000."""
    built: int = 0
    """Windows that had to be tokenized for this census, because they were not in the cache."""

    def to_json(self) -> str:
        return _written(asdict(self), "groups")

    @classmethod
    def from_json(cls, text: str) -> Census:
        values = json.loads(text)
        return cls(
            **{
                **values,
                "epochs": tuple(values["epochs"]),
                "names": tuple(values["names"]),
                "datasets": tuple(map(DatasetCount.from_dict, values["datasets"])),
                "skipped": tuple(SkippedRow(**row) for row in values["skipped"]),
            }
        )

    # A Fraction, because in floating point ceil(0.07 * 100) is 8.
    def samples_in(self, epochs: Fraction) -> int:
        """Return the packed samples in a run of `epochs` epochs, rounded up."""
        if len(self.epochs) == 1:
            return math.ceil(epochs * self.epochs[0])
        whole = min(math.floor(epochs), len(self.epochs))
        rest = epochs - whole
        return sum(self.epochs[:whole]) + (math.ceil(rest * self.epochs[whole]) if rest else 0)

    @property
    def tokens(self) -> int:
        return sum(count.tokens for count in self.datasets)

    @property
    def documents_of_sample(self) -> float:
        """The documents of an average sample; where they were not counted, one."""
        documents = sum(count.documents + count.cut for count in self.datasets)
        return max(1.0, documents / max(1, sum(self.epochs)))

    @property
    def efficiency(self) -> float:
        """The fraction of packed positions that hold a token; the rest is padding."""
        samples = sum(self.epochs)
        return self.tokens / (samples * self.seq_len) if samples else 0.0

    @property
    def total(self) -> DatasetCount:
        """The counts of all datasets together."""
        total = DatasetCount()
        for count in self.datasets:
            total.add(count)
        return total
