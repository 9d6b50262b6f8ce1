"""The rows that `data.bad_rows=skip` leaves out, each reported once: when the stream reaches its window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.plan.counts import SkippedRow

_ROWS_PER_EVENT = 100  # an event is one line of events.jsonl


class SkippedRows:
    """Which windows the stream has entered whose skipped rows were not reported yet."""

    def __init__(self, stream: Stream, cursor: Cursor, *, counted: bool) -> None:
        """With `counted`, a census has reported all rows already."""
        self._stream = stream
        self._next = (cursor.epoch, cursor.window + (cursor.index > 0))
        self._silent = counted or stream.windows.data.bad_rows == "error"

    def up_to(self, cursor: Cursor) -> Iterator[Mapping[str, Any]]:
        """Fields of events for the windows entered since the last call."""
        windows = self._stream.windows
        while not self._silent and self._next < (cursor.epoch, cursor.window + (cursor.index > 0)):
            epoch, place = self._next
            if windows.repeats and epoch:
                self._silent = True  # the first epoch had every window
            elif place >= windows.count(epoch):
                self._next = (epoch + 1, 0)
            else:
                self._next = (epoch, place + 1)
                counts = windows.counts(epoch, self._stream.window_at(epoch, place))
                if counts is not None:
                    yield from events_of_rows(counts.skipped)


def events_of_rows(rows: Sequence[SkippedRow]) -> Iterator[Mapping[str, Any]]:
    """Fields of the events that list these rows."""
    for first in range(0, len(rows), _ROWS_PER_EVENT):
        some = rows[first : first + _ROWS_PER_EVENT]
        yield {
            "reasons": dict(Counter(row.reason for row in some)),
            "rows": [{"where": row.where, "reason": row.reason, "message": row.message} for row in some],
        }
