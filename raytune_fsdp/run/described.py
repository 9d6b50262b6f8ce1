"""What trackers receive about a run besides its numbers: its data, the code around it, and what its bits depend on."""

from __future__ import annotations

import getpass
import hashlib
import json
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from raytune_fsdp.base.machine import processor
from raytune_fsdp.base.redaction import redact, redact_text
from raytune_fsdp.base.untrusted import is_count, shown
from raytune_fsdp.base.urls import is_url, without_secrets
from raytune_fsdp.config import DatasetConfig, FinetuneConfig
from raytune_fsdp.data.sources.source import Source
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.compile_layers import COMPILED
from raytune_fsdp.model.objective.routers import GROUPED
from raytune_fsdp.record.names import BITS_MAY_DIFFER
from raytune_fsdp.record.tracker import UsedData, flatten

BITS = "bits"
"""The field of an attempt's start that has the digest of what its bits depend on."""
_KERNELS = (
    "flash-attn", "flash-attn-3", "flash-linear-attention", "causal-conv1d", "mamba-ssm", "triton", "torchao", "peft",
)  # fmt: skip
"""Packages whose versions decide bits where they are installed."""
_GIT_SECONDS = 5
_URL = re.compile(r"[a-z][\w+.-]*://\S+")
_COMMAND = 4000
"""The most characters of a command that are kept: `python -c` may have a whole program."""


def used_data(config: FinetuneConfig, train: Windows, evals: Mapping[str, Windows]) -> tuple[UsedData, ...]:
    """Return the datasets of a run, those it trains on first."""
    found = list(_used(config.data.train, train, "training"))
    listed = config.data.eval if isinstance(config.data.eval, list) else []
    if listed:
        for dataset, windows in zip(listed, evals.values(), strict=True):
            found += _used([dataset], windows, "evaluation")
    else:  # rows held out of those above
        for name, windows in evals.items():
            for held_of, source in zip(windows.names, windows.sources, strict=True):
                place = {"uri": source.label, **source.selection}
                found.append(_one(f"{name}/{held_of}", source, "local", place, "evaluation"))
    return tuple(found)


def _used(
    datasets: list[DatasetConfig], windows: Windows, purpose: Literal["training", "evaluation"]
) -> Iterator[UsedData]:
    for dataset, name, source in zip(datasets, windows.names, windows.sources, strict=True):
        place: dict[str, object]
        if dataset.hub is not None:
            kind = "hugging_face"
            place = {
                "path": dataset.hub, "config_name": dataset.subset, "data_dir": None, "data_files": None,
                "split": dataset.split, "revision": dataset.revision,
            }  # fmt: skip
        else:
            assert dataset.path is not None
            url = is_url(dataset.path)
            kind = dataset.path.partition("://")[0] if url else "local"
            place = {"uri": without_secrets(dataset.path) if url else str(Path(dataset.path).expanduser().absolute())}
        yield _one(name, source, kind, place, purpose)


def _one(
    name: str, source: Source, kind: str, place: Mapping[str, object], purpose: Literal["training", "evaluation"]
) -> UsedData:
    content = json.dumps([list(source.fingerprints.values()), dict(source.selection)], sort_keys=True)
    digest = xxhash.xxh3_128_hexdigest(content.encode())
    return UsedData(name=name, digest=digest, kind=kind, place=redact(place), rows=len(source), purpose=purpose)


def started_by() -> dict[str, Any]:
    """Return the command that this process is, who started it, where, and on which code.

    It is kept in the run's directory and shown in the report. No model card has it, and trackers get it only as part of
    that page.
    """
    commit, user, directory = commit_here(), None, None
    with suppress(KeyError, OSError):  # a container may have no name for its user
        user = getpass.getuser()
    with suppress(OSError):  # it has been removed
        directory = str(Path.cwd())
    # As it was typed, if it is ours; otherwise as the interpreter was called.
    ours = Path(sys.argv[0]).stem == "raytune-fsdp"
    words = ["raytune-fsdp", *sys.argv[1:]] if ours else [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
    return {
        "command": shlex.join(_without_secrets(words))[:_COMMAND],
        "directory": directory,
        "host": socket.gethostname(),
        "user": user,
        "python": platform.python_version(),
        "commit": commit,
        "uncommitted": None if commit is None else changed_here(),
    }


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command without secrets: each by itself, since a shell's quotes hide where a value ends."""
    flag = ""
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            flag = "" if equals else word.removeprefix("--")
            yield f"{key}={_word(value, key.removeprefix('--'))}" if equals else redact_text(word)
        else:
            yield _word(word, flag)
            flag = ""


def _word(word: str, key: str) -> str:
    return str(redact(without_secrets(word) if _URL.fullmatch(word) else word, key))


def commit_here() -> str | None:
    """Return the git commit of the working directory; None if it is in no repository, or git is not installed."""
    return _git("rev-parse", "--verify", "HEAD") or None


def changed_here() -> bool | None:
    """Return whether files of the repository differ from its commit; None if git cannot say so in time."""
    # Without locks, and without the monitor that the repository may name. Its filters run, as with any `git status`.
    found = _git("--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain", "--untracked-files=no")
    return None if found is None else found != ""


def _git(*arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            [git, *arguments],
            capture_output=True, text=True, errors="replace", timeout=_GIT_SECONDS, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return asked.stdout.strip()
    return None


def versions() -> dict[str, str | None]:
    """Return the versions of what decides the bits of a result."""
    return {package: _version(package) for package in ("raytune-fsdp", "torch", "transformers")}


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):  # run from a source tree that is not installed
        return version(package)
    return None


def computed_on(device: torch.device, kernels: Mapping[str, KernelChoice]) -> dict[str, Any]:
    """Return what decides the bits of an attempt's results besides its config: equal entries mean equal bits."""
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "versions": versions()}
    if there := {name: installed for name in _KERNELS if (installed := _version(name)) is not None}:
        found["packages"] = there
    if device.type == "cuda":
        return {"device": f"{device.type}: {torch.cuda.get_device_name(device)}", **found}
    if "blocks" in kernels and kernels["blocks"].name == COMPILED:
        found["compiler"] = _cpp_compiler()
    name = processor() or platform.machine()
    return {"device": f"{device.type}: {name}", **found, "instructions": torch.backends.cpu.get_cpu_capability()}


def bits_digest(config: FinetuneConfig, computed: Mapping[str, Any], kernels: Mapping[str, KernelChoice]) -> str:
    """Return a digest of what the bits of a run with `run.exact` depend on, but does not belong to the run for good."""
    # An update has the same bits as one kernel and operation by operation: an exact run tries that. Grouped products
    # are what all runs had before there was a choice.
    chosen = {what: choice.name for what, choice in kernels.items() if what != "update"}
    if chosen.get("experts") == GROUPED:
        del chosen["experts"]
    decides = {**computed, **chosen, "micro_batch": config.train.micro_batch}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _cpp_compiler() -> str:
    """Return the version of the compiler by which torch makes kernels of a CPU."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler  # takes a second

    with suppress(Exception):  # whatever a search for one raises
        return get_compiler_version_info(get_cpp_compiler())
    return "unknown"


def why_bits_differ(computed: Sequence[Mapping[str, Any]]) -> str | None:
    """Say why the bits of a run with `run.exact` depend on which rank has what; None if they do not.

    `computed`: where each rank computes.
    """
    for rank, other in enumerate(computed):
        if different := _difference(computed[0], other):
            return "rank 0 has {} {}, and rank {} has {}".format(*different[:2], rank, different[2])
    return None


def why_bits_changed(computed: Mapping[str, Any], digest: str, before: Mapping[str, Any] | None) -> str | None:
    """Say why steps of a run with `run.exact` may get other bits than before; None if they must get the same.

    `before`: the fields of the last attempt's start.
    """
    if before is None or before.get(BITS, digest) == digest:
        return None
    if different := _difference(computed, before):
        return "this attempt has {} {}, and the one before had {}".format(*different)
    return "this attempt has another micro-batch or other kernels than the one before"


def why_bits_differed(events: Iterable[Mapping[str, Any]], attempt: int, step: int) -> tuple[str, int] | None:
    """Say why a checkpoint of this step may have other bits since an earlier step, if its ranks were not alike.

    `attempt`: the last one, which is looked at. None: its ranks were alike, or it has not saved anything.
    """
    for event in events:
        began, because = (event["fields"].get(key) for key in ("step", "because"))
        unlike = event["event"] == BITS_MAY_DIFFER and event["fields"].get("among_ranks") is True
        if unlike and event["attempt"] == attempt and isinstance(because, str) and is_count(began) and began < step:
            return f"in attempt {attempt} {because}", began
    return None


def _difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first thing that differs, with both values."""
    others = flatten(there)
    for key, value in flatten(here).items():
        if others.get(key) != value:
            return key.removeprefix("versions.").removeprefix("packages."), shown(value), shown(others.get(key))
    return None
