"""Fetch the weights of a hub model into this machine's cache of the hub, as the hub's own library keeps them.

A file grows as `blobs/<sha256>.incomplete`, and another start goes on where a crash has ended it; the library itself
would begin from the start. Two processes that fetch one file at the same time write the same bytes to the same places,
so no lock is needed: locks of network file systems cannot be relied on.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from raytune_fsdp.base.errors import ModelError, RaytuneError, TransientError, in_one_line
from raytune_fsdp.base.machine import free_space
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.base.untrusted import open_regular, shown
from raytune_fsdp.model.directory.hub_weights import (
    HUB_SECONDS,
    HubWeights,
    as_patterns,
    cache,
    list_files,
    named_cache,
    of_storage,
    opened,
    place_of,
    refused,
    side_by_side,
    size_of,
    why,
)

CONNECTIONS = 8
_CHUNK_BYTES = 1 << 24
"""Of a file, read and hashed at once."""
_TRIES = 6
"""Tries for a file, in a row, that bring no byte."""
_MOST_BYTES = 50 * 10**9
"""Largest file that can be fetched by plain HTTP. The hub gives longer files only through a protocol of its own."""


class Download:
    """Fetches the files that this machine's cache lacks, in threads of their own."""

    def __init__(self, hub: HubWeights) -> None:
        self._hub = hub
        self._lacking = hub.lacking()
        self._blobs = place_of(hub.repository) / "blobs"
        self._came = {name: 0 if name in self._lacking else size for name, size in hub.sizes.items()}
        self._checked = dict.fromkeys(hub.sizes, 0)
        self._by_library = False
        self._work = in_thread(self._run, "hub")

    @property
    def came(self) -> int:
        """Bytes that are here."""
        others = self._blobs.glob("*.incomplete") if self._by_library else ()
        return sum(self._came.values()) + sum(max(0, size_of(each)) for each in others)

    @property
    def checked(self) -> int:
        """Bytes that were compared with what the hub has: of a large file that takes minutes, in which none comes."""
        return sum(self._checked.values())

    def done(self) -> bool:
        """Return whether all files are here. Raise the error that has kept them from coming."""
        if not self._work.done():
            return False
        self._work.result()
        return True

    def _run(self) -> None:
        try:
            if self._lacking:
                self._fetch()
        except Exception as error:  # which HTTP library raises it depends on the version of huggingface_hub
            raise _explained(self._hub, error) from error

    def _fetch(self) -> None:
        from huggingface_hub import snapshot_download

        hub, lacking, blobs = self._hub, self._lacking, self._blobs
        large = _checked(hub, lacking)
        blobs.mkdir(parents=True, exist_ok=True)
        side_by_side(lambda name: self._fetch_file(name, large[name]), sorted(large), CONNECTIONS)
        self._by_library = len(large) < len(lacking)
        # The library gives these files their names, and fetches the others.
        snapshot_download(
            hub.repository, revision=hub.commit, allow_patterns=as_patterns(lacking), etag_timeout=HUB_SECONDS,
            max_workers=CONNECTIONS,
        )  # fmt: skip
        if left := hub.lacking():
            raise ModelError(
                f"{hub.what}, on {socket.gethostname()}: {left[0]} is not the file that the hub had when the run was "
                f"prepared: remove {place_of(hub.repository)}, or set HF_ENDPOINT to another mirror"
            )

    def _fetch_file(self, name: str, blob: Path) -> None:
        """Fetch one file as `blob`, whose name is the SHA-256 of its content."""
        size, partial = self._hub.sizes[name], blob.with_name(f"{blob.name}.incomplete")
        tries, kept = 0, size_of(partial) > 0
        while size_of(blob) != size:
            before = self._came.get(name, 0)
            try:
                self._go_on(name, partial, size)
                wrong = self._put_in_place(name, partial, blob)
                if wrong is not None and not kept:
                    raise TransientError(
                        f"{self._hub.what}, on {socket.gethostname()}: what came of it is not what the hub has "
                        f"(SHA-256 {wrong}, not {blob.name}); it was removed, and another start fetches it again"
                    )
                kept = False  # what an earlier start had left was wrong, such as zeros after a crash
            except Exception as error:
                tries = tries + 1 if self._came.get(name, 0) <= before else 0
                lasting = isinstance(error, RaytuneError) or of_storage(error) or refused(error, "") is not None
                if lasting or tries == _TRIES:
                    raise
                time.sleep(min(2**tries, 30))
        self._came[name] = size

    def _go_on(self, name: str, partial: Path, size: int) -> None:
        """Fetch the bytes of a file that are not here yet."""
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(partial.lstat().st_mode):  # a link would lead to somebody's file
                partial.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o666), "r+b") as file:
            there = os.fstat(file.fileno()).st_size
            self._came[name] = start = there if there <= size else 0
            if start < size:
                with opened(self._hub, name, start) as (begin, pieces):
                    file.seek(begin)
                    self._came[name] = begin
                    for piece in pieces:
                        if self._came[name] == size:  # and more comes, perhaps without an end
                            break
                        self._came[name] += file.write(piece[: size - self._came[name]])
            if self._came[name] < size:
                raise ConnectionError(f"{name} ended after {self._came[name]} of {size} bytes")
            file.truncate(size)
            os.fsync(file.fileno())

    def _put_in_place(self, name: str, partial: Path, blob: Path) -> str | None:
        """Give a file that is complete its name if its content is what that says. Else it is removed, and the SHA-256
        of what it was is returned."""
        digest = hashlib.sha256()
        try:
            with os.fdopen(open_regular(partial), "rb") as file:
                while piece := file.read(_CHUNK_BYTES):
                    digest.update(piece)
                    self._checked[name] += len(piece)
        except FileNotFoundError:  # another process has been faster
            return None
        if digest.hexdigest() != blob.name:
            partial.unlink(missing_ok=True)
            return digest.hexdigest()
        with suppress(FileNotFoundError):
            partial.replace(blob)
        return None


def why_not(hub: HubWeights) -> RaytuneError | None:
    """Return why this machine could not fetch what it lacks of these weights; None if it could, or has all; network."""
    try:
        if lacking := hub.lacking():
            _checked(hub, lacking)
    except Exception as error:
        return _explained(hub, error)
    return None


def _checked(hub: HubWeights, lacking: Sequence[str]) -> dict[str, Path]:
    """Refuse what cannot be fetched here. Return the blobs of the files that are named by the hash of their content."""
    from huggingface_hub import constants

    blobs = place_of(hub.repository) / "blobs"
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{hub.what}: HF_HUB_OFFLINE is set on {socket.gethostname()}, whose cache ({named_cache()}) lacks "
            f"{len(lacking)} of its {len(hub.sizes)} weight files: unset it in the environment of that machine's "
            f"`ray start`, or download the model there: hf download {hub.repository} --revision {hub.commit}"
        )
    listed = list_files(hub.repository, hub.commit)
    digests = {name: digest for name in lacking if (digest := listed.get(name, (0, None))[1]) is not None}
    for name, digest in digests.items():  # they become names of files here
        if re.fullmatch("[0-9a-f]{64}", digest) is None:
            raise ModelError(
                f"{hub.what}: {constants.ENDPOINT} lists {shown(digest)} as the SHA-256 of {name}, which is none: set "
                "HF_ENDPOINT to another mirror, or leave it out"
            )
    large = {name: blobs / digest for name, digest in digests.items() if hub.sizes[name] <= _MOST_BYTES}
    _check_room(hub, {name: large.get(name, blobs / name) for name in lacking})
    return large


def _explained(hub: HubWeights, error: Exception) -> RaytuneError:
    """Turn the error into one line that names this machine."""
    if isinstance(error, RaytuneError):
        return error
    here = f"{hub.what}, on {socket.gethostname()}"
    if of_storage(error):
        return ModelError(
            f"{here}: {named_cache()} cannot be written ({in_one_line(error)}): make room there, or set HF_HOME to a "
            "place that can be written, in the environment of that machine's `ray start`"
        )
    return refused(error, here) or TransientError(
        f"{here}: the hub cannot be reached, or stopped answering ({why(error)}); what has come is kept, and another "
        "start goes on from there"
    )


def _check_room(hub: HubWeights, blobs: Mapping[str, Path]) -> None:
    """Refuse a download that would fill the disk, before it begins. `blobs`: where the files will be."""
    needed = 0
    for name, blob in blobs.items():
        there = max(size_of(blob), size_of(blob.with_name(f"{blob.name}.incomplete")), 0)
        needed += max(0, hub.sizes[name] - there)
    free = free_space(cache())
    if needed > free:
        raise ModelError(
            f"{hub.what}: its weights need {needed / 1e9:,.1f} GB more on {socket.gethostname()}, and {named_cache()} "
            f"has room for {free / 1e9:,.1f} GB: make room there, or set HF_HOME to a larger disk, in the environment "
            "of that machine's `ray start`"
        )
