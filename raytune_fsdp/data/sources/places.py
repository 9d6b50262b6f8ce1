"""Find the files behind a path, a pattern, a directory or a URL, in a stable order."""

from __future__ import annotations

import glob
import heapq
import itertools
import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.base.untrusted import read_file
from raytune_fsdp.base.urls import is_url, without_secrets
from raytune_fsdp.config.sections.data import SourceConfig
from raytune_fsdp.data.mixture import OLDEST_ORDER, ORDER_VERSION, THIRD_ORDER
from raytune_fsdp.data.sources.remote import SIDE_FILE_BYTES, remote_files
from raytune_fsdp.data.sources.source import (
    File,
    expand_stars,
    has_wildcard,
    is_hidden,
    is_not_read,
    is_wanted,
    kind_of,
    matcher,
    reading,
)
from raytune_fsdp.data.sources.splits import SplitFiles

_LOOKED_AT = 1000
"""Files of a directory that are compared with a name that is not there."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a dataset, in order."""

    files: list[File]
    order_version: int
    """The lowest version of the order that finds these files: see `mixture`."""


def find_files(dataset: SourceConfig, *, order: int = ORDER_VERSION) -> Found:
    """Find all files of the dataset, as version `order` finds them. Raises DataError if there are none."""
    assert dataset.path is not None, dataset
    path = dataset.path.removeprefix("file://")
    if not path or "\0" in path:
        raise DataError(f"path={path!r} is not a path; name a file, a directory, a pattern or a URL with rows")
    try:
        pattern = expand_stars(path)
    except ValueError as error:
        raise DataError(f"{without_secrets(path)}: {error}; correct the path") from error

    choose = SplitFiles(dataset, without_secrets(path), order)
    remote = is_url(path)
    found = (
        Found(remote_files(path, pattern, choose), OLDEST_ORDER)
        if remote
        else _local_files(path, pattern, choose, order)
    )
    choose.check()
    if not found.files:
        relative = "" if remote or os.path.isabs(os.path.expanduser(path)) else f" (relative to {Path.cwd()})"
        raise DataError(f"{without_secrets(path)}: no file matches this pattern{relative}; correct the dataset's path")
    return replace(found, order_version=max(found.order_version, choose.order_version))


def one_kind(files: list[File], dataset: SourceConfig) -> str:
    """Return the kind of all files, from the config or their endings."""
    if dataset.file_type != "auto":
        return dataset.file_type
    kinds: dict[str, str] = {}
    for file in files:
        kind = kind_of(file.url)
        if kind is None and is_not_read(file.url):
            raise DataError(
                f"{file.shown}: is compressed in a way, or of a kind, that is not read; write it as .jsonl, .jsonl.gz, "
                ".jsonl.zst or .parquet, or narrow the dataset's path to the files you want"
            )
        if kind is None:
            raise DataError(
                f"{file.shown}: its ending does not say what it is; set file_type to jsonl, json, csv, text, parquet "
                "or arrow, or narrow the dataset's path to the files you want"
            )
        kinds.setdefault(kind, file.shown)
    if len(kinds) > 1:
        both = ", ".join(f"{kind}: {shown}" for kind, shown in kinds.items())
        raise DataError(
            f"{without_secrets(dataset.path or '')}: has files of several kinds ({both}); make a dataset of each kind, "
            "and name its files with a pattern"
        )
    return next(iter(kinds))


def _local_files(path: str, pattern: str, choose: Callable[..., list[str]], order: int) -> Found:
    place = os.path.expanduser(path)
    # `~` or `~user` is shown as the user wrote it.
    home = place[: len(place) - len(path.lstrip("~"))] if path.startswith("~") else ""

    def to_file(found: str) -> File:
        shown = "~" + found[len(home) :] if home and found.startswith(home) else found
        with reading(shown):
            facts = os.stat(found)
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(
                f"{shown}: is not a regular file, so its rows cannot be read in any order; write them to a file first"
            )
        return File(shown, os.path.abspath(found), facts.st_size, str(facts.st_mtime_ns))

    try:
        os.stat(place)
    except (FileNotFoundError, NotADirectoryError):
        if has_wildcard(place):
            pattern = os.path.expanduser(pattern)
            if order < THIRD_ORDER or "**" not in pattern.split("/"):
                matches, again = glob.glob(pattern, recursive=True), False
            else:
                matches, again = _matching(pattern)
            # Not only those that are files: a link to nothing is a file that is missing, and no reason to leave it out.
            names = sorted(match for match in matches if not os.path.isdir(match) and is_wanted(match, pattern))
            return Found([to_file(name) for name in names], THIRD_ORDER if again else OLDEST_ORDER)
        relative = "" if os.path.isabs(place) else f" (relative to {Path.cwd()})"
        folder, name = os.path.split(path)
        with suppress(OSError):
            with os.scandir(os.path.dirname(place) or ".") as entries:
                beside = [each.name for each in itertools.islice(entries, _LOOKED_AT)]
            relative += "".join(
                f"; nearest: {os.path.join(folder, near)}" for near in get_close_matches(name, beside, 1, 0.75)
            )
        raise DataError(f"{path}: no such file{relative}; correct the dataset's path") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if not os.path.isdir(place):
        return Found([to_file(place)], OLDEST_ORDER)
    if order < THIRD_ORDER:
        below, again = _walk_as_before(place, shown=path), False
    else:
        with reading(path):
            below, again = _walk(place, [""], skip=is_hidden)
    names = choose(below, lambda name: read_file(Path(place, name), limit=SIDE_FILE_BYTES, links=True))
    return Found([to_file(os.path.join(place, name)) for name in names], THIRD_ORDER if again else OLDEST_ORDER)


def _matching(pattern: str) -> tuple[list[str], bool]:
    """Return what a pattern with `**` matches, and whether `glob` would give some files twice.

    `glob` follows links wherever they lead, and names a file once for each way to divide its path between two `**`.
    """
    parts = pattern.split("/")
    first = parts.index("**")
    head = "/".join(parts[:first])
    tops = glob.glob(f"{head}/") if head or parts[0] == "" and first else [""]
    below, again = _walk("", tops, skip=lambda name: name.startswith("."), unreadable=False)
    top, matches = re.compile("|".join(map(re.escape, tops))).match, matcher("/".join(parts[first:]))
    found = [name for name in below if (inside := top(name)) is not None and matches(name[inside.end() :])]
    return found, again or parts.count("**") > 1


def _walk(
    top: str, folders: Sequence[str], *, skip: Callable[[str], bool], unreadable: bool = True
) -> tuple[list[str], bool]:
    """Return the files below these folders, by names relative to `top`, and whether a link led to a directory again.

    Links to directories are followed, but each directory is read once: a link may lead to its own parent, or two links
    to one directory. A directory has the name without a link if there is one, else the first name. So the names do not
    depend on the order in which the file system lists them. Without `unreadable`, directories that may not be read are
    skipped.
    """
    names: list[str] = []
    links = [folder for folder in folders if os.path.islink(os.path.join(top, folder).rstrip("/"))]
    plain = [folder for folder in folders if folder not in links]
    heapq.heapify(links)
    seen: set[str] = set()
    again = False
    while plain or links:
        is_link = not plain
        folder = heapq.heappop(links) if is_link else plain.pop()
        real = os.path.realpath(os.path.join(top, folder))
        holder = os.path.realpath(os.path.join(top, os.path.dirname(folder.rstrip("/"))))
        if real in seen or (is_link and os.path.commonpath([real, holder]) == real):
            again = True  # second case: a link to a directory that holds the link, perhaps above the first of `folders`
            continue
        seen.add(real)
        try:
            with os.scandir(os.path.join(top, folder) or ".") as entries:
                for entry in entries:
                    name = os.path.join(folder, entry.name)
                    if not _is_directory(entry):
                        names.append(name)
                    elif skip(entry.name):
                        pass
                    elif entry.is_symlink():
                        heapq.heappush(links, name)
                    else:
                        plain.append(name)
        except OSError:
            if unreadable:
                raise
    return names, again


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk_as_before(top: str, *, shown: str) -> list[str]:
    """Walk as version 2 of the order did: of two names of a directory, take the one the file system lists first."""

    def stop(error: OSError) -> None:
        raise error

    names: list[str] = []
    seen: set[str] = set()
    with reading(shown):
        for folder, folders, files in os.walk(top, followlinks=True, onerror=stop):
            folders[:] = [name for name in folders if not is_hidden(name)]
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            names += [os.path.relpath(os.path.join(folder, name), top) for name in files]
    return names
