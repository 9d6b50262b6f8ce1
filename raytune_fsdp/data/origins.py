"""From which rows the packed samples of a window come."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytune_fsdp.data.packing import Arrangement
from raytune_fsdp.data.rows.formats import Document
from raytune_fsdp.plan.counts import DatasetCount, SkippedRow


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Where a document of a packed sample comes from."""

    dataset: int
    where: str
    """File and line of the row, as messages show them."""
    first_token: int
    """How many of the row's tokens come before it: not 0 for a later piece of a row that was cut."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows of a window as documents, before they are packed. A row that was split has several."""

    counts: list[DatasetCount]
    skipped: list[SkippedRow] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """Of each document, its dataset."""
    wheres: list[str] = field(default_factory=list)
    """And file and line of its row."""
    rows: list[int] = field(default_factory=list)
    """And the number of its row in the window."""


def origins(found: Gathered, arranged: Arrangement) -> list[list[RowOrigin]]:
    """Of each packed sample, where its documents come from, in their order."""
    first_tokens: list[int] = []
    for number, parent in enumerate(arranged.parents):
        # Parts of a row, and pieces of a part, stand one directly after the other.
        goes_on = number > 0 and found.rows[arranged.parents[number - 1]] == found.rows[parent]
        before = number - 1
        first_tokens.append(first_tokens[before] + len(arranged.pieces[before].input_ids) if goes_on else 0)

    def origin(piece: int) -> RowOrigin:
        parent = arranged.parents[piece]
        return RowOrigin(found.sources[parent], found.wheres[parent], first_tokens[piece])

    return [[origin(piece) for piece in members] for members in arranged.bins]
