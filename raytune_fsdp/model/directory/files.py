"""Find a model's files, in a local directory or in the hub's cache after a download. Reads names, not weights."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash

from raytune_fsdp.base.errors import ModelError, first_line, in_one_line
from raytune_fsdp.base.threads import READERS, in_thread
from raytune_fsdp.base.untrusted import MIB, UnsoundError, read_json, reason
from raytune_fsdp.model.directory.bounds import check_header, check_index
from raytune_fsdp.model.directory.hub_weights import (
    HUB_SECONDS,
    HubWeights,
    TensorHeader,
    as_patterns,
    kept_headers,
    list_files,
    named_cache,
    of_storage,
    read_headers,
    refused,
    why,
)
from raytune_fsdp.model.directory.quantization import Packed, Quantization, read_quantization

_INDEX_BYTES = 64 * MIB
"""A model.safetensors.index.json of DeepSeek-V3, with 91,000 tensors, has 9 MB."""

# Files of a config, a tokenizer, a chat template and the code of a model.
_SMALL_FILES = [
    "*.json", "*.jinja", "*.model", "*.txt", "*.py", "tokenizer*", "*.tiktoken", "*.codes", "*.spm", "*.tokenizer",
]  # fmt: skip
# Second copies of gpt-oss's weights, 14 GB, for the programs of its makers.
_NOT_FETCHED = ["original/*", "metal/*"]
# The files of a directory that will be read; others may be anybody's notes.
_READ_FILES = [
    "*config.json", "tokenizer*", "*.model", "*.tiktoken", "*.codes", "*.spm", "vocab*", "merges.txt", "*.jinja",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The safetensors files of a checkpoint: which file holds which tensor."""

    directory: Path
    file_of: dict[str, str]
    quantization: Quantization | None = None
    hub: HubWeights | None = None
    """Where a machine that lacks the files gets them. None: they are not from the hub."""
    headers: Mapping[str, TensorHeader] | None = None
    """What is known of each tensor, if the files are not here. None: they are."""

    def here(self) -> WeightFiles:
        """Return these files where this machine has them once they are fetched."""
        return self if self.hub is None else replace(self, directory=self.hub.directory, headers=None)

    def where(self, key: str) -> str:
        """Return the key and its file, for messages."""
        return f"{key} in {self.directory / self.file_of[key]}"

    def tensors(self) -> Mapping[str, Packed | None]:
        """Return the tensors by name; a quantized one is stored under two keys. Refuse one that lacks one of them."""
        if self.quantization is None:
            return dict.fromkeys(self.file_of)
        found = self.quantization.tensors(self.file_of)
        for packed in found.values():
            for there, lacking in ((packed.numbers, packed.scales), (packed.scales, packed.numbers)) if packed else ():
                if lacking not in self.file_of:
                    raise ModelError(
                        f"{self.where(there)} is of no use without {lacking}, which is missing: its weights are "
                        f"quantized ({self.quantization.method}), in numbers and scales; download the model again"
                    )
        return found

    def sizes(self) -> dict[str, int]:
        """Return the size of each file, to compare what different ranks see."""
        if self.headers is not None and self.hub is not None:
            return dict(sorted(self.hub.sizes.items()))
        return {name: (self.directory / name).stat().st_size for name in sorted(set(self.file_of.values()))}

    def digests(self, names: Sequence[str]) -> dict[str, str]:
        """Return the xxh3_128 of the bytes of these files, in hex."""

        def digest(name: str) -> str:
            with (self.directory / name).open("rb") as file:
                return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

        with ThreadPoolExecutor(READERS) as readers:
            return dict(zip(names, readers.map(digest, names), strict=True))


def locate(path: str, revision: str | None, *, field: str, weights: bool) -> Path:
    """Return the directory of a model or tokenizer. A hub model is downloaded into the local cache first; network.

    `weights=False` downloads only the small files: enough to check a config before anything is started.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        # The libraries that read files which this user may not read would call them broken.
        may = partial(os.access, effective_ids=os.access in os.supports_effective_ids)
        refused = [] if may(local, os.R_OK | os.X_OK) else [local]
        if not refused:
            patterns = [*_READ_FILES, "*.safetensors*"] if weights else _READ_FILES
            files = (file for pattern in patterns for file in sorted(local.glob(pattern)))
            refused = [file for file in files if file.is_file() and not may(file, os.R_OK)]
        if refused:
            raise ModelError(
                f"{field}={path}: {refused[0]} may not be read by this user (permission denied); change its permissions"
            )
        return local.absolute()
    if local.exists():
        raise ModelError(f"{field}={path} is a file; it must be a Hugging Face model directory or a hub name")
    if not is_hub_name(path):
        raise ModelError(
            f"{field}={path}: there is no such directory; give that of a model, or its name on the hub (owner/name)"
        )
    return _fetch(path, revision, field=field, weights="model" if weights else None)


def is_local(path: str) -> bool:
    """Return whether `locate` would take this for a directory here."""
    return Path(path).expanduser().is_dir() or not is_hub_name(path)


def commit_of(directory: Path) -> str | None:
    """Return the hub's commit that a directory of its cache holds; None if it is not in the cache."""
    cached = directory.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", directory.name)
    return directory.name if cached else None


def is_hub_name(path: str) -> bool:
    """Return whether this can be the name of a model or dataset on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _fetch(name: str, revision: str | None, *, field: str, weights: str | None) -> Path:
    """Download a snapshot from the hub. Each of the hub's ways to refuse becomes a line of its own.

    `weights`: what their file, or its index, is called; None: only the small files.
    """
    from huggingface_hub import snapshot_download

    what = _what(name, revision, field)
    silence = ask_hub(name, revision).silence
    snapshot = partial(
        snapshot_download,
        name,
        revision=revision,
        etag_timeout=HUB_SECONDS,
        max_workers=4,
        local_files_only=silence is not None,  # without a hub, an earlier download will do
    )
    try:
        directory = Path(snapshot(allow_patterns=_SMALL_FILES, ignore_patterns=_NOT_FETCHED))
        if weights is not None:
            # No others, such as the same weights once more: ranks fetch none, and they need not be in the cache.
            names = _files_of(_indexed(directory, weights), weights)
            if not all((directory / each).is_file() for each in names):
                snapshot(allow_patterns=as_patterns(names))
    except OSError as error:  # the errors of the hub's library are kinds of it
        if of_storage(error):
            raise ModelError(
                f"{what}: {named_cache()} cannot be written ({in_one_line(error)}): make room there, or set HF_HOME to "
                "a place that can be written"
            ) from error
        raise (silence is None and refused(error, what)) or _unreachable(what, silence or in_one_line(error)) from error
    return directory


def _what(name: str, revision: str | None, field: str) -> str:
    return f"{field}={name}" + (f" at revision {revision}" if revision else "")


def _unreachable(what: str, reason: str) -> ModelError:
    return ModelError(
        f"{what}: not a directory here, not in the local cache, and the hub cannot be reached ({reason}); give the "
        "path of a downloaded model, or download it once while the hub can be reached"
    )


@dataclass(frozen=True, slots=True)
class HubAnswer:
    silence: str | None = None
    """Why the hub cannot be reached; None if it answers, whatever the answer: a download gets the same one."""
    refusal: str | None = None
    """Why the hub refuses the model."""


def ask_hub(name: str, revision: str | None) -> HubAnswer:
    """Ask whether the hub can be reached, and would give the model.

    A thread asks, and is abandoned after HUB_SECONDS: a download waits far longer than a user should for a name server,
    a proxy or a hub that accepts connections and then does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    asked = in_thread(lambda: HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS), "hub")
    if not wait([asked], timeout=HUB_SECONDS).done:
        return HubAnswer(f"no answer within {HUB_SECONDS} s")
    error = asked.exception()  # which HTTP library raises it depends on the version of huggingface_hub
    if error is None:
        return HubAnswer()
    refused = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
    return HubAnswer(refusal=in_one_line(error)) if refused else HubAnswer(in_one_line(error))


def cached(name: str, revision: str | None) -> Path | None:
    """Return the directory of a hub model in the local cache, with or without weights; None if it is not there.

    It does not ask the hub.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Without this pattern the library takes a directory for incomplete that lacks any file: weights, a README, …
        return Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["*config.json"]))
    except LocalEntryNotFoundError:
        return None


def find_weights(directory: Path, name: str = "model") -> WeightFiles:
    """Find the safetensors files in `directory`, by their index or the header of the only one. Reads no tensor."""
    single = directory / f"{name}.safetensors"
    file_of = _indexed(directory, name)
    if file_of is None and single.is_file():
        from safetensors import SafetensorError, safe_open

        try:
            check_header(single)
            with safe_open(single, "pt") as handle:
                file_of = dict.fromkeys(handle.keys(), single.name)
        except (SafetensorError, OSError, UnsoundError) as error:
            raise ModelError(
                f"{single} is not a complete safetensors file ({first_line(error)}): download it again"
            ) from error
    if file_of is None:
        raise _no_safetensors(directory, [path.name for path in directory.glob("*")], name)
    missing = sorted({name for name in file_of.values() if not (directory / name).is_file()})
    if missing:
        raise _lacks(directory, missing)
    return WeightFiles(directory=directory, file_of=file_of, quantization=read_quantization(directory))


def known_weights(path: str, revision: str | None, *, field: str, name: str = "model") -> WeightFiles:
    """Find the weights of a model; for a hub model that is not in the local cache, only read their headers; network.

    Only ranks fetch such files: the machine that prepares a run may not be one that trains it.
    """
    if is_local(path) or Path(path).expanduser().exists():
        return find_weights(locate(path, None, field=field, weights=True), name)
    directory = _fetch(path, revision, field=field, weights=None)
    commit, file_of = commit_of(directory), _indexed(directory, name)
    if commit is None:
        return find_weights(_fetch(path, revision, field=field, weights=name), name)
    names = _files_of(file_of, name)
    if all((directory / each).is_file() for each in names):
        files = find_weights(directory, name)
        return replace(files, hub=HubWeights(repository=path, commit=commit, field=field, sizes=files.sizes()))
    what = _what(path, revision, field)
    hub = HubWeights(repository=path, commit=commit, field=field, sizes=dict.fromkeys(names, 0))
    try:
        if (kept := kept_headers(hub)) is None:
            listed = list_files(path, commit)
            if missing := [each for each in names if each not in listed]:
                raise _no_safetensors(what, sorted(listed), name) if file_of is None else _lacks(what, missing)
            hub = replace(hub, sizes={each: listed[each][0] for each in names})
            kept = hub, read_headers(hub)
    except ModelError:
        raise
    except Exception as error:  # which HTTP library raises it depends on the version of huggingface_hub
        raise refused(error, what) or _unreachable(what, why(error)) from error
    hub, by_file = kept
    headers = {key: header for each in by_file.values() for key, header in each.items()}
    if file_of is None:
        file_of = dict.fromkeys(headers, names[0])
    for key, file in file_of.items():
        if key not in by_file[file]:
            raise ModelError(f"{what}: its {file} does not hold {key}, although the index says so")
    quantization = read_quantization(directory)
    return WeightFiles(directory=directory, file_of=file_of, quantization=quantization, hub=hub, headers=headers)


def _indexed(directory: Path, name: str) -> dict[str, str] | None:
    """Return the file of every tensor, from the index in `directory`; None if there is no index."""
    index = directory / f"{name}.safetensors.index.json"
    if not index.is_file():
        return None
    try:
        file_of = check_index(read_json(index, limit=_INDEX_BYTES, links=True))
    except ValueError as error:
        raise ModelError(
            f"{index} is not a safetensors index with a weight_map ({reason(error)}): download it again"
        ) from error
    for file in file_of.values():
        # Checked as text, not by where it leads: the files of a hub model are links out of its directory.
        if not file or "\0" in file or "\\" in file or file.startswith("/") or ".." in file.split("/"):
            raise ModelError(f"{index} names {file!r}, which is not a file in its directory: download it again")
    return file_of


def _files_of(file_of: Mapping[str, str] | None, name: str) -> list[str]:
    """The files of weights with this index; None if they have none, and are in one file."""
    return [f"{name}.safetensors"] if file_of is None else sorted(set(file_of.values()))


def _lacks(where: Path | str, missing: Sequence[str]) -> ModelError:
    names = ", ".join(missing[:3])
    return ModelError(f"{where} lacks {len(missing)} of its weight files ({names}): download the model again")


def _no_safetensors(where: Path | str, there: Sequence[str], name: str) -> ModelError:
    pickles = sorted(each for each in there if each.endswith((".bin", ".pt", ".pth")))
    if pickles:
        return ModelError(
            f"{where} has its weights only as {pickles[0]}, a pickle, which can run code when loaded: convert it once "
            "with transformers, on a machine without secrets (from_pretrained, then save_pretrained, which writes "
            "safetensors)"
        )
    if name == "model" and "adapter_model.safetensors" in there:
        return ModelError(
            f"{where} has the weights of an adapter alone: set method.adapter to it, and model.path to its base"
        )
    return ModelError(f"{where} has no {name}.safetensors and no {name}.safetensors.index.json: no weights to load")
