"""The manifest makes a directory a checkpoint: it has size and hash of every file in it, and is written last."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.untrusted import (
    MIB,
    UnsoundError,
    check_format,
    is_count,
    is_file_name,
    parse_json,
    reason,
    shown,
)
from raytune_fsdp.checkpoint.storage import (
    INDEX_FILE,
    MANIFEST_BYTES,
    MANIFEST_FILE,
    PIECES,
    STATE_BYTES,
    STATE_FILE,
    XXH3,
    Storage,
    index_limit,
)

if TYPE_CHECKING:
    from raytune_fsdp.checkpoint.writing import Sum

_CHUNK_BYTES = 1 << 20
_SOON_READ = 1 << 30
"""Less than this is hashed at once, whatever it is."""
_SMALL_BYTES = 64 * MIB
"""What any file without tensors may have: .metadata, written for other tools, is about as large as the index."""
_SHA256 = re.compile("[0-9a-f]{64}")

FORMAT = 2
"""Manifest and index have the same. In format 1 the index has the place of every piece."""


def make_manifest(sums: Mapping[str, Sum], digest: Mapping[str, str] | None = None) -> str:
    """Return the manifest of these files, with the `digest` of their numbers if there is one."""
    files = {name: {"bytes": each.bytes, "xxh3": each.xxh3} for name, each in sorted(sums.items())}
    return json.dumps({"format": FORMAT, **({"digest": digest} if digest else {}), "files": files}, indent=1)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the manifest of a checkpoint says."""

    files: Mapping[str, tuple[int, str]]
    """Size and hash of every file."""
    digest: Mapping[str, str]
    """The digests that the ranks have computed of what they had: `weights` and `everything`; or nothing."""

    @property
    def sizes(self) -> dict[str, int]:
        return {file: size for file, (size, _) in self.files.items()}


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Return what the manifest of a checkpoint says.

    Raise ValueError if it is not a manifest, OSError if it cannot be read. Whoever could write a checkpoint has written
    this, too: it says what belongs together, not who made it.
    """
    read = parse_json(storage.read(name, MANIFEST_FILE, MANIFEST_BYTES))
    if not isinstance(read, dict) or not isinstance(read.get("files"), dict):
        raise UnsoundError("has no list of files")
    check_format(read.get("format"), 1, FORMAT)
    found = {}
    for file, each in read["files"].items():
        if not is_file_name(file) or file == MANIFEST_FILE:
            raise UnsoundError(f"names {shown(file)}, which is not the name of a file in a checkpoint")
        size, digest = (each.get("bytes"), each.get("xxh3")) if isinstance(each, dict) else (None, None)
        if not is_count(size) or not isinstance(digest, str) or not XXH3.fullmatch(digest):
            raise UnsoundError(f"has no size and hash of {file}")
        found[file] = size, digest
    missing = {STATE_FILE, INDEX_FILE} - found.keys()
    if missing:
        raise UnsoundError(f"does not list {sorted(missing)[0]}")
    return Manifest(found, _digest(read.get("digest")))


def _digest(found: Any) -> Mapping[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or found.keys() != {"weights", "everything"}:
        raise UnsoundError("has a digest without exactly weights and everything")
    for each in found.values():
        if not (isinstance(each, str) and _SHA256.fullmatch(each)):
            raise UnsoundError(f"has the digest {shown(each)}")
    return found


def check_files(
    storage: Storage, name: str, *, hashes: bool, share: tuple[int, int] = (0, 1), threads: int = 1
) -> str | None:
    """Compare sizes and hashes of a checkpoint's files with its manifest. Return the problem; None if it is intact.

    Without `hashes`, only small files are hashed. With `share=(rank, world)`, only this rank's part is: together the
    ranks check every file. `threads`: parallel readers. Raise OSError if the storage does not answer, which says
    nothing about the checkpoint.
    """
    try:
        manifest = read_manifest(storage, name)
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is gone"
    except ValueError as error:
        return f"{MANIFEST_FILE} is not what was written: {reason(error)}"
    wanted, present = manifest.files, storage.sizes(name)
    for file, (size, _) in wanted.items():
        if file not in present:
            return f"{file} is gone, or is not a regular file with content"
        if present[file] != size:
            return f"{file} has {present[file]} bytes instead of {size}"
    if (wrong := _too_large(storage, name, manifest.sizes, hashes)) is not None:
        return wrong
    to_hash = {file: size for file, (size, _) in wanted.items() if hashes or not file.endswith(PIECES)}
    mine = share_of(to_hash, *share)

    def problem(file: str) -> str | None:
        try:
            digest = hash_file(storage, name, file, present[file])
        except FileNotFoundError:
            return f"{file} is gone"
        except UnsoundError as error:
            return f"{file} {error}"
        return None if digest == wanted[file][1] else f"the content of {file} is not what was written"

    if threads == 1:
        return next(filter(None, map(problem, mine)), None)
    with ThreadPoolExecutor(threads) as readers:  # neither reading nor hashing holds Python's lock
        return next(filter(None, list(readers.map(problem, mine))), None)


def _too_large(storage: Storage, name: str, sizes: Mapping[str, int], hashes: bool) -> str | None:
    """Return the problem if a file is larger than what is in it: to hash terabytes that are never read takes hours."""
    if sum(sizes.values()) < _SOON_READ:
        return None
    most = {INDEX_FILE: index_limit(sizes), STATE_FILE: STATE_BYTES}
    if hashes:
        try:
            most |= _sizes_in(storage.read(name, INDEX_FILE, most[INDEX_FILE]), sizes)
        except FileNotFoundError:
            return f"{INDEX_FILE} is gone"
        except ValueError as error:
            return f"{INDEX_FILE} is not what was written: {reason(error)}"
    for file, size in sizes.items():
        limit = most.get(file, size if file.endswith(PIECES) else max(_SMALL_BYTES, 4 * sizes[INDEX_FILE]))
        if size > limit:
            return f"{file} has {size} bytes, more than the {limit} that may be in it"
    return None


def _sizes_in(content: bytes, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how large the files of tensors may be, by what an index says about them."""
    from raytune_fsdp.checkpoint.index import parse_index, room_of  # brings torch, which few callers need

    most = dict.fromkeys((file for file in sizes if file.endswith(PIECES)), MIB)
    index = parse_index(content, sizes)
    return most | {file.name: MIB + room for file, (_, room) in zip(index.files, room_of(index), strict=True)}


def hash_file(storage: Storage, name: str, file: str, size: int) -> str:
    """Return the xxh3_128 of a file, read from the storage."""
    digest = xxhash.xxh3_128()
    view = memoryview(bytearray(min(size, _CHUNK_BYTES)))
    with storage.open(name, file) as source:
        for start in range(0, size, _CHUNK_BYTES):
            beat()
            chunk = view[: min(_CHUNK_BYTES, size - start)]
            source.read_into(start, chunk)
            digest.update(chunk)
    return digest.hexdigest()


def share_of(sizes: Mapping[str, int], rank: int, world: int) -> list[str]:
    """Return a rank's share of the files: the largest file first, each to the rank with the fewest bytes so far."""
    load = [0] * world
    mine = []
    for file, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        least = load.index(min(load))
        load[least] += size
        if least == rank:
            mine.append(file)
    return mine
