"""Weights of a hub model on a machine that need not have them: their place in its cache, and their headers.

Headers are read by ranges of bytes: a few kilobytes per file say whether the weights fit, before anything is fetched.
"""

from __future__ import annotations

import errno
import glob
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.base.errors import ModelError, in_one_line, setting
from raytune_fsdp.base.threads import READERS, in_thread
from raytune_fsdp.base.untrusted import MIB, UnsoundError, check_size, is_count, parse_json, read_json, reason, shown
from raytune_fsdp.model.directory.bounds import HEADER_BYTES, check_tensors
from raytune_fsdp.model.directory.tensorfile import DTYPES

HUB_SECONDS = 4
"""How long a hub may take for its first answer, before it counts as unreachable."""
_LIST_SECONDS = 30.0
"""How long listing a model's files may take."""

_FIRST_BYTES = 16 << 10
"""Bytes of a file that are read first: the header of each file of a 70B has 3 kB, of DeepSeek-V3 75 kB."""
_KEPT_BYTES = 64 * MIB
_LATER = {408, 429}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubWeights:
    """The weight files of one commit of a hub model, which any machine can fetch. Picklable."""

    repository: str
    commit: str
    field: str
    """The field of the config that names the model."""
    sizes: Mapping[str, int]
    """Bytes of each file."""

    @property
    def what(self) -> str:
        """The field and the model, for messages."""
        return f"{self.field}={self.repository}"

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def directory(self) -> Path:
        """Where this machine has the files, or will have them."""
        return place_of(self.repository) / "snapshots" / self.commit

    def lacking(self) -> list[str]:
        """Return the files that are not in this machine's cache."""
        return [name for name, size in sorted(self.sizes.items()) if size_of(self.directory / name) != size]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What the header of a safetensors file says about a tensor."""

    dtype: str
    """The format's name of the type: `BF16`."""
    shape: tuple[int, ...]


def cache() -> Path:
    """Return the directory where this machine keeps what comes from the hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def place_of(repository: str) -> Path:
    """Return the directory of a model in the cache."""
    return cache() / f"models--{repository.replace('/', '--')}"


def size_of(path: Path) -> int:
    """Return a file's size, or -1 if there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def refused(error: Exception, what: str) -> ModelError | None:
    """Turn each of the hub's refusals into an error of one line; return None for any other error."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):  # a subclass of RepositoryNotFoundError, so it is checked first
        return ModelError(
            f"{what}: access to this hub model is restricted; accept its terms on its page, then {setting('HF_TOKEN')}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{what}: the hub model has no such revision; see its page for branches and commits")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"{what}: neither a directory here nor a model on the hub (or it is private: {setting('HF_TOKEN')})"
        )
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if 400 <= status < 500 and status not in _LATER:
        return ModelError(f"{what}: the hub refuses ({why(error)}); check the name, or {setting('HF_TOKEN')}")
    return None


def of_storage(error: Exception) -> bool:
    """Return whether this machine's storage has failed, and not the hub."""
    return isinstance(error, OSError) and (error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT))


def named_cache() -> str:
    """Return the variable that says where the cache is, with its value."""
    from huggingface_hub import constants

    home, place = Path(constants.HF_HOME), cache()
    return f"HF_HOME={home}" if place == home / "hub" else f"HF_HUB_CACHE={place}"


def why(error: Exception) -> str:
    """Return the error in one line, without the signatures in addresses."""
    return re.sub(r"\?[^\s'\")]+", "?…", in_one_line(error))


def as_patterns(names: Iterable[str]) -> list[str]:
    """Names of files as patterns of the hub's library that match them alone."""
    return [glob.escape(name) for name in names]


def list_files(repository: str, commit: str) -> dict[str, tuple[int, str | None]]:
    """Return the size of each file of a commit, and the SHA-256 of those that the hub stores as large; network."""
    from huggingface_hub import HfApi

    found = HfApi().model_info(repository, revision=commit, files_metadata=True, timeout=_LIST_SECONDS)
    return {each.rfilename: (each.size or 0, each.lfs and str(each.lfs.sha256)) for each in found.siblings or []}


Headers = dict[str, dict[str, TensorHeader]]
"""Headers by file and key."""


def read_headers(hub: HubWeights) -> Headers:
    """Read what the header of each file says about its tensors; network."""
    names = sorted(hub.sizes)
    found: Headers = {}

    def read(name: str) -> None:
        try:
            found[name] = _parsed(_header(hub, name), hub.sizes[name])
        except ValueError as error:
            raise ModelError(
                f"{hub.what}: its {name} is not a complete safetensors file ({reason(error)}): it can only be mended "
                "on the hub"
            ) from error

    side_by_side(read, names)
    # So that a run goes on while the hub cannot be reached. A model and an adapter of one repository share a file:
    # their weights have different names.
    kept = {name: [hub.sizes[name], {k: [t.dtype, t.shape] for k, t in each.items()}] for name, each in found.items()}
    path = _kept(hub.repository, hub.commit)
    with suppress(OSError, ValueError):
        kept = {**(read_json(path, limit=_KEPT_BYTES) if path.exists() else {}), **kept}
    with suppress(OSError):  # the cache may be read-only
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_at_once(path, json.dumps(kept).encode())
    return found


def _kept(repository: str, commit: str) -> Path:
    return place_of(repository) / "headers" / f"{commit}.json"


def kept_headers(hub: HubWeights) -> tuple[HubWeights, Headers] | None:
    """Return the sizes and headers of these files, if this machine has read them before."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = read_json(_kept(hub.repository, hub.commit), limit=_KEPT_BYTES)
        sizes = {name: int(kept[name][0]) for name in hub.sizes}
        headers = {
            name: {key: TensorHeader(str(dtype), tuple(shape)) for key, (dtype, shape) in kept[name][1].items()}
            for name in hub.sizes
        }
        return replace(hub, sizes=sizes), headers
    return None


def _parsed(text: bytes, size: int) -> dict[str, TensorHeader]:
    """Parse a header; refuse one that does not describe a whole file of this size."""
    check_tensors(text)
    values = parse_json(text)
    if not isinstance(values, dict):
        raise UnsoundError("has a header that is not a JSON object")
    values.pop("__metadata__", None)
    found, end = {}, 0
    for key, each in values.items():
        try:
            dtype, shape, place = str(each["dtype"]), list(each["shape"]), list(each["data_offsets"])
        except (KeyError, TypeError) as error:
            raise UnsoundError(f"has a header that does not say where {shown(key)} is") from error
        if len(place) != 2 or not all(is_count(number) for number in [*shape, *place]):
            raise UnsoundError(f"has a header that says {shown(place)} of the place of {shown(key)}")
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != place[1] - place[0]:
            raise UnsoundError(f"has a header that gives {shown(key)} another size than place")
        found[key] = TensorHeader(dtype, tuple(shape))
        end = max(end, place[1])
    if 8 + len(text) + end != size:
        raise UnsoundError(f"has {size} bytes, and its header is of a file of {8 + len(text) + end}")
    return found


def _header(hub: HubWeights, name: str) -> bytes:
    size = hub.sizes[name]
    begin = _bytes_of(hub, name, 0, min(size, _FIRST_BYTES)) if size >= 8 else b""
    length = int.from_bytes(begin[:8], "little")
    check_size(length, HEADER_BYTES)
    if len(begin) < 8 or 8 + length > size:
        raise UnsoundError(f"has {size} bytes, and says that its header alone has {length}")
    text = begin[8 : 8 + length]
    if len(text) < length:
        text += _bytes_of(hub, name, 8 + len(text), 8 + length)
    return text


def _bytes_of(hub: HubWeights, name: str, start: int, stop: int) -> bytes:
    with opened(hub, name, start, stop) as (begin, pieces):
        found = bytearray()
        for piece in pieces:
            found += piece
            if len(found) >= stop - begin:
                break
    return bytes(found[start - begin : stop - begin])


@contextmanager
def opened(hub: HubWeights, name: str, start: int, stop: int | None = None) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield where the hub's answer begins, and its bytes. It may begin at the file's start, whatever was asked for."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(hub.repository, name, revision=hub.commit)
    wanted = f"bytes={start}-{'' if stop is None else stop - 1}"
    headers = {**build_hf_headers(), "Range": wanted, "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
        hf_raise_for_status(answer)
        # Bytes as they come: with chunks of a fixed size, the last would be lost with the connection.
        yield start if answer.status_code == 206 else 0, answer.iter_bytes()


def side_by_side(work: Callable[[str], None], names: Sequence[str], threads: int = READERS) -> None:
    """Call `work` for each name, some at a time, in threads that this process does not wait for when it ends."""
    left = deque(names)

    def some() -> None:
        while True:
            try:
                name = left.popleft()
            except IndexError:
                return
            try:
                work(name)
            except BaseException:
                left.clear()
                raise

    for each in [in_thread(some, "hub") for _ in range(min(threads, len(names)))]:
        each.result()
