"""Give an export its place, and the mark by which a later export knows what it may replace.

The mark lists every file with its size, and with its hash unless it holds weights. A directory with anything else in
it, or with a file that was edited since, holds somebody's work, and is not replaced. The mark is not pushed to the hub:
it is about this directory only.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp.base.durable import sync_directory
from raytune_fsdp.base.errors import ModelError, TransientError
from raytune_fsdp.base.untrusted import MIB, read_json
from raytune_fsdp.model.directory.known_files import CONFIG_FILE, code_files, is_known, is_weights

logger = logging.getLogger(__name__)

_HOST = socket.gethostname()

MARK_FILE = "raytune_fsdp_export.json"
_FORMAT = 1
_ABOUT = "Written by raytune_fsdp. Its next export to this place replaces these files, and refuses if there are others."
_MAX_BYTES = 64 * MIB


@contextmanager
def new_export(destination: Path, model_files: Path, *, adopt: bool = False) -> Iterator[Path]:
    """Yield a directory to write an export of a run into. When the context ends, it is marked and renamed.

    `model_files`: the run's own model directory. `destination` is either complete or not there. It is not replaced if
    it holds anything but an export; see `check_replaceable` for `adopt`.
    """
    destination = Path(os.path.realpath(destination))  # a link is followed, not replaced
    _check_apart(destination, model_files)
    check_replaceable(destination, adopt=adopt)
    _remove_left(destination)
    staging = _sibling(destination, "export")
    try:
        staging.mkdir(parents=True)
        yield staging
        put_mark(staging)
        sync_directory(staging)
        check_replaceable(destination, adopt=adopt)  # again: writing may have taken an hour
        if any(destination.glob("*")) and not (destination / MARK_FILE).exists():
            logger.warning("%s: the export of an older version, which left no mark, is replaced", destination)
        _put_in_place(staging, destination)
    except OSError as error:
        raise TransientError(
            f"{destination} could not be written: {error}; make room or choose another place, then export again"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, destination: Path) -> None:
    """Rename the export to its name. An older one is renamed first: a directory cannot be replaced in one step."""
    old = _sibling(destination, "replaced")
    with suppress(FileNotFoundError):
        destination.rename(old)
    try:
        staging.rename(destination)
    except OSError:
        if old.exists() and not destination.exists():
            old.rename(destination)
        raise
    finally:
        if destination.exists():
            shutil.rmtree(old, ignore_errors=True)
    sync_directory(destination.parent)


def _sibling(destination: Path, what: str) -> Path:
    """Return a unique name next to the destination. It names the process that uses it, for `_remove_left`."""
    return destination.with_name(f".{destination.name}.{what}-{_HOST}-{os.getpid()}-{uuid.uuid4().hex[:6]}")


def _remove_left(destination: Path) -> None:
    """Remove what killed exports of this machine left next to the destination."""
    ours = re.compile(rf"\.{re.escape(destination.name)}\.(export|replaced)-{re.escape(_HOST)}-([0-9]+)-[0-9a-f]{{6}}")
    for left in destination.parent.glob(f".{glob.escape(destination.name)}.*"):
        found = ours.fullmatch(left.name)
        # A `.replaced-` directory may be the only copy there is: its export died between the two renames.
        if found and not Path(f"/proc/{found[2]}").exists() and (found[1] == "export" or destination.exists()):
            shutil.rmtree(left, ignore_errors=True)


def _check_apart(destination: Path, model_files: Path) -> None:
    """Refuse a destination that would overwrite the run's own files, or lie among them."""
    model_files = Path(os.path.realpath(model_files))
    for one, other in ((destination, model_files), (model_files, destination)):
        if one == other or other in one.parents:
            raise ModelError(
                f"{destination} is, contains or lies in {model_files}, which the run needs: export elsewhere"
            )


def put_mark(directory: Path) -> None:
    """Mark a directory that an export has just written."""
    files = {name: _seen(directory / name) for name in sorted(_files(directory))}
    values = {"format": _FORMAT, "about": _ABOUT, "files": files}
    (directory / MARK_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def check_replaceable(destination: Path, *, adopt: bool) -> None:
    """Refuse a destination that holds anything but what an export made.

    Older versions left no mark. With `adopt`, a model directory without a mark counts as an export if it holds nothing
    but files that an export writes.
    """
    if not destination.exists():
        return
    try:
        why = _problem(destination, adopt=adopt) if destination.is_dir() else "it is not a directory"
    except OSError as error:
        why = f"it cannot be read ({error})"
    if why is not None:
        raise ModelError(f"{destination} is not replaced, as {why}: export to another path, or move it away")


def _problem(destination: Path, *, adopt: bool) -> str | None:
    """Return why a directory may not be replaced; None if it may be."""
    there = _files(destination)
    if not there:
        return None
    if MARK_FILE in there:
        listed = _read_mark(destination)
        if isinstance(listed, str):
            return listed
        strange = sorted(name for name in there if name != MARK_FILE and name not in listed)
        changed = sorted(name for name in listed if name in there and _differs(destination / name, listed[name]))
        if strange:
            return f"it holds {_some(strange)}, which no export wrote"
        return f"{_some(changed)} changed since the export that wrote it" if changed else None
    if not adopt or CONFIG_FILE not in there:
        return f"no export made it (it has no {MARK_FILE})"
    code = code_files(destination)
    strange = sorted(name for name in there if not (is_known(name) or is_weights(name) or name in code))
    return f"it holds {_some(strange)}, which no export writes" if strange else None


def _some(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _read_mark(directory: Path) -> dict[str, Any] | str:
    """Return the files that the mark lists, or what is wrong with the mark."""
    path = directory / MARK_FILE
    try:
        values = read_json(path, limit=_MAX_BYTES)
        number, files = values["format"], values["files"]
        if not isinstance(number, int) or not isinstance(files, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        return f"its {MARK_FILE} is not what an export writes"
    return files if number == _FORMAT else f"its {MARK_FILE} has format {number}, and this version knows {_FORMAT}"


def _files(directory: Path) -> list[str]:
    """Return the relative name of every entry below a directory that is not a directory. Links are not followed."""
    found: list[str] = []

    def unreadable(error: OSError) -> None:
        raise error  # otherwise os.walk takes the directory for an empty one

    for folder, folders, files in os.walk(directory, onerror=unreadable):  # lists links to directories as folders
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        empty = [] if files or folders or Path(folder) == directory else ["."]
        found += [os.path.relpath(os.path.join(folder, name), directory) for name in [*files, *links, *empty]]
    return found


def _differs(path: Path, listed: Any) -> bool:
    about = path.lstat()
    same_size = isinstance(listed, dict) and stat.S_ISREG(about.st_mode) and about.st_size == listed.get("bytes")
    return not same_size or _seen(path) != listed


def _seen(path: Path) -> dict[str, Any]:
    """Return the size and hash of a file. Weights are not hashed: reading 140 GB again takes minutes."""
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        return {"bytes": size}
    with open(path, "rb") as file:
        return {"bytes": size, "xxh3_128": hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}
