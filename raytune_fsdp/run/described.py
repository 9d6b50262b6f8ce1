"""What trackers receive about a run besides its numbers: its data, and the commit of the code around it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import xxhash

from raytune_fsdp.base.redaction import redact
from raytune_fsdp.base.urls import is_url, without_secrets
from raytune_fsdp.config import DatasetConfig, FinetuneConfig
from raytune_fsdp.data.sources.source import Source
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.record.tracker import UsedData

_GIT_SECONDS = 5


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
            place = {"path": dataset.hub, "config_name": dataset.subset, "data_dir": None, "data_files": None}
            place |= {"split": dataset.split, "revision": dataset.revision}
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


def commit_here() -> str | None:
    """Return the git commit of the working directory; None if it is in no repository, or git is not installed."""
    git = shutil.which("git")
    if git is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            [git, "rev-parse", "--verify", "HEAD"],
            capture_output=True, text=True, timeout=_GIT_SECONDS, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return asked.stdout.strip() or None
    return None
