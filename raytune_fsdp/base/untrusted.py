"""Read files that a stranger may have written: within limits, and without waiting for what is not a file.

Checkpoints, models and run directories travel between people. What has the name of one of our files may be a pipe that
nobody writes to, a device, a link to another place, a terabyte, or JSON that is a hundred thousand lists deep. The
reader of a file decides what it may contain; this module decides what any file may be.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

MIB = 1 << 20
MAX_DEPTH = 64
"""The most levels of nesting. Configs and tokenizers of models have up to 8; Python's functions give up at 1,000."""
MAX_VALUES = 2_000_000
"""The most values in a file that is parsed here. Each may take 200 bytes of memory: empty lists, three bytes each, take
twenty times the size of their file. The 128,000 added tokens of a speech model are 1,000,000 values."""
LINE_BYTES = 16 * MIB
"""The longest line of a record. A line with the answers to every prompt of an evaluation has some 100 KB."""


NULS = MIB
"""A record ends after this many zero bytes: a crash of the machine leaves some of them, and files without content,
which take no room on a disk, have terabytes. JSON has none."""
_HOLLOW_BYTES, _HOLLOW_SHARE, _MOST_EXTENTS = 64 * MIB, 1000, 10_000
"""A file larger than the first number is hollow if less than one part in the second number is on the disk."""


class UnsoundError(ValueError):
    """What is wrong with a file, as the end of a sentence that begins with its name: "is not a regular file"."""


GIT_LFS = b"version https://git-lfs.github.com/spec/"
"""What a file begins with that a clone without Git LFS has in place of a large one."""
IS_POINTER = "is a pointer of Git LFS, not the file itself: run `git lfs pull` in its repository"


def reason(error: Exception) -> str:
    """Return in one clause why a file is not what it should be, from what reading or parsing it has raised."""
    text = f"it {error}" if isinstance(error, UnsoundError) else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:500]


def open_regular(path: str | os.PathLike[str], *, links: bool = False, write: bool = False) -> int:
    """Open a regular file for reading, with `write` also for changing it; return the handle.

    `links`: its name may be a symbolic link, as in the hub's cache.
    """
    # Checked before it is opened: opening a device may have an effect, and opening a pipe waits for a writer.
    _check_kind(os.stat(path, follow_symlinks=links))
    flags = os.O_RDWR if write else os.O_RDONLY
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise UnsoundError("is a symbolic link, not a regular file") from error
        raise
    try:
        _check_kind(os.fstat(handle))  # again: it may have been replaced meanwhile
    except UnsoundError:
        os.close(handle)
        raise
    return handle


def _check_kind(facts: os.stat_result) -> None:
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe"}
    if not stat.S_ISREG(facts.st_mode):
        raise UnsoundError(f"is {kinds.get(stat.S_IFMT(facts.st_mode), 'a device or socket')}, not a regular file")


def is_hollow(path: str | os.PathLike[str], facts: os.stat_result, *, links: bool = False) -> bool:
    """Return whether a large file is nearly all hole: it takes no room, and hours to read."""
    if facts.st_size < _HOLLOW_BYTES or facts.st_blocks * 512 * _HOLLOW_SHARE > facts.st_size:
        return False
    handle = open_regular(path, links=links)
    try:
        return _bytes_there(handle) * _HOLLOW_SHARE < facts.st_size
    finally:
        os.close(handle)


def _bytes_there(handle: int) -> int:
    """Return how many bytes of a file are not in holes: all, on file systems that know no holes."""
    there = place = 0
    for _ in range(_MOST_EXTENTS):
        try:
            begin = os.lseek(handle, place, os.SEEK_DATA)
            place = os.lseek(handle, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing comes after it
                return there
            break
        there += place - begin
    return os.fstat(handle).st_size


def read_file(path: str | os.PathLike[str], *, limit: int, links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    with os.fdopen(open_regular(path, links=links), "rb") as file:
        facts = os.fstat(file.fileno())
        size = facts.st_size
        check_size(size, limit)
        if is_hollow(path, facts, links=links):
            raise UnsoundError(f"has {size} bytes, of which next to none are on the disk")
        content = file.read(size + 1)
    check_size(len(content), limit)
    return content


def check_size(size: int, limit: int) -> None:
    """Refuse a file of this size if that is more than a file of its kind ever has."""
    if size > limit:
        raise UnsoundError(f"has {size} bytes, more than the {limit} that such a file may have")


def read_json(path: str | os.PathLike[str], *, limit: int, links: bool = False) -> Any:
    """Return the content of a JSON file as transformers reads it: the last of equal keys counts, NaN is a number."""
    return parse_json(read_file(path, limit=limit, links=links), doubles=True, constants=True)


def read_json_object(path: str | os.PathLike[str], *, limit: int, links: bool = False) -> dict[str, Any]:
    """Return the content of a JSON file that is one object."""
    found = read_json(path, limit=limit, links=links)
    if not isinstance(found, dict):
        raise UnsoundError("is not a JSON object")
    return found


def parse_json(
    content: bytes,
    *,
    doubles: bool = False,
    constants: bool = False,
    values: int = MAX_VALUES,
    depth: int | None = MAX_DEPTH,
) -> Any:
    """Parse JSON of at most `values` values.

    Unless allowed, keys that occur twice in an object (`doubles`), NaN and infinities (`constants`) are refused.
    """
    openers = content.count(b"[") + content.count(b"{")
    check_values(content, values)
    try:
        parsed = _DECODERS[doubles, constants].decode(content.decode())
    except RecursionError as error:
        raise UnsoundError("is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError, UnsoundError):
        raise
    except ValueError as error:
        raise UnsoundError("has a number of thousands of digits") from error
    if depth is not None and openers > depth:  # fewer cannot be deeper
        _check_depth(parsed, depth)
    return parsed


def check_values(content: bytes, limit: int = MAX_VALUES) -> None:
    """Refuse JSON that may have more than `limit` values, before it is parsed; commas in its texts count, too."""
    if content.count(b",") + content.count(b"[") + content.count(b"{") > limit:
        raise UnsoundError(f"has more than {limit} values, more than such a file may have")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnsoundError(f"has the key {shown(twice)} twice")
    return found


def _no_constant(name: str) -> Any:
    raise UnsoundError(f"has {name} where a number belongs")


# Made once: a record has a million lines.
_DECODERS = {
    (doubles, constants): json.JSONDecoder(
        object_pairs_hook=None if doubles else _unique, parse_constant=None if constants else _no_constant
    )
    for doubles in (False, True)
    for constants in (False, True)
}


def _check_depth(value: Any, depth: int) -> None:
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += (child for child in each.values() if isinstance(child, dict | list))
            elif isinstance(each, list):
                inner += (child for child in each if isinstance(child, dict | list))
        if not inner:
            return
        level = inner
    raise UnsoundError(f"is nested deeper than {depth} levels")


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a growing record, up to its end or to where it is no longer a record.

    If a line is longer than a record's can be, only its beginning.
    """
    nuls = 0
    with os.fdopen(open_regular(path, links=True), "rb") as file:
        while line := file.readline(LINE_BYTES):
            rest = line
            while (nuls := nuls + rest.count(0)) <= NULS and not rest.endswith(b"\n"):
                if not (rest := file.readline(LINE_BYTES)):
                    break
            if nuls > NULS:
                return
            yield line if rest is line else line[: LINE_BYTES - 1] + b"\n" * rest.endswith(b"\n")


def is_file_name(name: object) -> bool:
    """Return whether this is a name inside a directory: text without separators, not `.` or `..`."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name.isprintable()
        and not {name} & {".", ".."}
        and ("/" not in name and "\\" not in name)
    )


def is_count(value: object) -> TypeGuard[int]:
    """Return whether this is an integer that fits 63 bits and is not negative. True does not count as 1."""
    return type(value) is int and 0 <= value < 1 << 63


def check_format(version: object, *known: int) -> None:
    """Refuse a file of ours that another version has written: its format is none of those `known`, by default 1."""
    if type(version) is not int or version not in (known or (1,)):
        formats = " and ".join(map(str, known or (1,)))
        raise UnsoundError(f"has format {shown(version)}, but this version reads only format {formats}")


def printable(text: str, keep: str = "") -> str:
    """Return a stranger's text as a terminal may get it: nothing moves the cursor or ends a line, except `keep`."""
    return "".join(char if char.isprintable() or char in keep else "\N{MIDDLE DOT}" for char in text)


class Printable(logging.Formatter):
    """Makes log records printable: warnings name files, and their names may be a stranger's."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def without_controls(text: str) -> str:
    """Return a model's answer as a terminal may get it. Characters that join others, as in emoji and Persian, stay."""
    return _CONTROLS.sub("\N{MIDDLE DOT}", text)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]")
"""Control characters except tabs and line ends, with the marks and embeddings that change the direction of text."""


def printable_json(line: str) -> str:
    """Return an equal line of JSON in which a stranger's texts cannot control a terminal."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


def shown(value: object) -> str:
    """Return a stranger's value for a message: short, and on one line."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
