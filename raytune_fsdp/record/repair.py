"""Check a `metrics.jsonl`, and mend it, before anything is added to it.

A record that a run continues has exactly one line for every step up to its checkpoint, in order, with the evaluations
between them. Whatever has broken one (a crash of the machine, a full disk, an editor, two files put together), the
lines that can be trusted are kept, the problems are named, and the broken file stays next to the new one.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from raytune_fsdp.base.durable import open_private, sync_directory, take_from_others
from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import LINE_BYTES, NULS
from raytune_fsdp.record.lines import WHOLE_STEP, read_line, step_of

_PIECE = 2**22  # bytes that are read at a time

Span = tuple[int, int]
"""The place of a line in its file: its first byte, and the byte after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found in the record that a run continues."""

    evaluated: frozenset[tuple[int, str]] = frozenset()
    """Step and key of every evaluation on record."""
    problems: tuple[str, ...] = ()
    """What was wrong with the record; usually nothing."""


def truncate(path: Path, last_step: int, *, aside: Path, begins_after: int = 0) -> Checked:
    """Remove every line after `last_step` (for `begins_after`: all) and what a crash left unfinished, atomically.

    The record begins with the step after `begins_after`, which a fork's parent has trained.

    If the lines up to there are not what they should be, they are mended, and the broken file is kept as `aside`. The
    file is replaced even when nothing is cut: a process of an earlier attempt that is still alive then writes into a
    file that nobody reads.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a crash, or a link that leads elsewhere
    with _opened(path) as file, open(temporary, "wb", opener=open_private) as output:
        if last_step == begins_after:
            spans, taken = [], Checked()
        elif (written := _as_written(file, last_step, begins_after)) is not None:
            spans, taken = [(0, written[0])], Checked(evaluated=frozenset(written[1]))
        else:
            spans, taken = _salvage(file, last_step, begins_after)
        for first, after in spans:
            _copy(file, first, after, output)
        output.flush()
        os.fsync(output.fileno())
    if taken.problems and path.exists():
        aside.unlink(missing_ok=True)
        try:
            os.link(path, aside)  # where the file system can: a copy of 20 GB of holes would fill the disk
            take_from_others(aside)  # everybody could read an older version's record
        except OSError:
            with path.open("rb") as broken, open(aside, "wb", opener=open_private) as kept:
                shutil.copyfileobj(broken, kept)
    os.replace(temporary, path)
    sync_directory(path.parent)
    return taken


def is_whole(path: Path, last_step: int, begins_after: int = 0) -> bool:
    """Return whether the record has exactly one line for every step up to this one, in order. See `truncate`."""
    with _opened(path) as file:
        return _as_written(file, last_step, begins_after) is not None


def _as_written(file: BinaryIO, last_step: int, begins_after: int) -> tuple[int, set[tuple[int, str]]] | None:
    """Return where the lines up to a step end, and their evaluations; None if they are not as they were written."""
    newest, end, evaluated = begins_after, 0, set[tuple[int, str]]()
    for step, after, keys in _lines(file):
        if step > last_step and newest == last_step:
            break
        # Only the next step may follow, or an evaluation after the newest step.
        if step != newest + (keys is None):
            return None
        newest, end = step, after
        if keys is not None:
            evaluated |= {(step, key) for key in keys}
    return (end, evaluated) if newest == last_step else None


def _salvage(file: BinaryIO, last_step: int, begins_after: int) -> tuple[list[Span], Checked]:
    """Return the lines of a broken record that can be trusted, and what is wrong with the others."""
    steps: dict[int, Span] = {}
    evaluations: list[tuple[int, Span]] = []
    evaluated: set[tuple[int, str]] = set()
    strange = again = highest = end = 0
    in_order = True
    for step, after, keys in _lines(file):
        first, end = end, after
        if step < 0:
            strange += 1
            continue
        if not begins_after <= step <= last_step or (step == begins_after and keys is None):
            continue
        in_order, highest = in_order and step >= highest, max(step, highest)
        if keys is None:
            # The last line counts: a step is trained again after a resume, and the weights have what was trained last.
            again += step in steps
            steps[step] = first, after
        elif all((step, key) in evaluated for key in keys):
            again += 1
        else:
            evaluations.append((step, (first, after)))
            evaluated |= {(step, key) for key in keys}
    missing = [step for step in range(begins_after + 1, last_step + 1) if step not in steps]
    said = (
        (strange, f"{_lines_in_words(strange)} neither a step nor an evaluation, and left out"),
        (again, f"{_lines_in_words(again)} there twice; one of each is kept"),
        (not in_order, "lines were not in the order of their steps, and are now"),
        (missing, f"the lines of {_steps_in_words(missing)} are missing, and lost"),
    )
    problems = tuple(words for wrong, words in said if wrong)
    # Sorting keeps the order of what is equal: first the step, then its evaluations.
    found = sorted([*steps.items(), *evaluations], key=lambda each: each[0])
    return [span for _, span in found], Checked(evaluated=frozenset(evaluated), problems=problems)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, Iterable[str] | None]]:
    """Yield for every finished line its step (-1: neither step nor evaluation), where it ends, an evaluation's keys."""
    file.seek(0)
    offset, rest, nuls = 0, b"", 0
    while nuls <= NULS and (piece := file.read(_PIECE)):
        nuls += piece.count(0)
        if nuls > NULS:
            piece = piece[: piece.index(0)]  # what follows is no record
        chunk = rest + piece
        end = chunk.rfind(b"\n") + 1
        position = 0
        for match in WHOLE_STEP.finditer(chunk, 0, end):
            if match.start() > position:
                yield from _others(chunk[position : match.start()], offset + position)
            position = match.end()
            yield int(match[1]), offset + position, None
        yield from _others(chunk[position:end], offset + position)
        rest = chunk[end:]
        if len(rest) > LINE_BYTES:
            rest = b"\0"  # do not keep an endless line in memory, and do not take its last part for a line
        offset += len(chunk) - len(rest)
    if read_line(rest) is not None:  # editors leave out the end of the last line; a crash leaves half of it
        yield from _others(rest, offset)


def _others(lines: bytes, offset: int) -> Iterator[tuple[int, int, Iterable[str] | None]]:
    """Yield what `_lines` does, for lines that are not steps in the form in which we write them."""
    for raw in lines.splitlines(keepends=True):
        offset += len(raw)
        line = read_line(raw)
        if line is None:
            yield -1, offset, None
        else:
            yield step_of(line), offset, None if line["kind"] == "step" else line["values"]


def _opened(path: Path) -> BinaryIO:
    """Open the file for reading, or an empty one if there is none. A pipe or a device would keep its reader waiting."""
    if not path.exists():
        return io.BytesIO()
    if not path.is_file():
        raise ResumeError(f"{path} is not a regular file, so it cannot be the record of the run: move it away")
    return path.open("rb")


def _copy(file: BinaryIO, first: int, after: int, output: BinaryIO) -> None:
    file.seek(first)
    last = b"\n"
    while first < after and (piece := file.read(min(_PIECE, after - first))):
        first += len(piece)
        output.write(piece)
        last = piece[-1:]
    if last != b"\n":
        output.write(b"\n")


def _lines_in_words(count: int) -> str:
    return f"{count:,} lines were" if count > 1 else "1 line was"


def _steps_in_words(steps: list[int]) -> str:
    """Name steps as in `steps 3, 7-9 and more, 20 in all`: at most eight pieces."""
    pieces: list[list[int]] = []
    for step in steps:
        if pieces and step == pieces[-1][-1] + 1:
            pieces[-1][1:] = [step]
        else:
            pieces.append([step])
    shown, rest = pieces[:8], len(pieces) - 8
    text = ", ".join("-".join(map(str, piece)) for piece in shown)
    more = f" and more, {len(steps):,} in all" if rest > 0 else ""
    return f"step{'s' if len(steps) > 1 else ''} {text}{more}"
