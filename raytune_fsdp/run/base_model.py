"""The frozen weights under adapters: a run continues with the very files that it began with, or not at all.

A checkpoint of such a run holds the adapters, and the place of the base with a hash of each of its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import ConfigError, ModelError, ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.adapters.attach import added_rows_of
from raytune_fsdp.model.directory.files import WeightFiles, commit_of, is_local
from raytune_fsdp.model.export.adapter import check_found_by_others
from raytune_fsdp.model.fill import FillMode
from raytune_fsdp.run.same_files import digests
from raytune_fsdp.run.starting_weights import StartingWeights

Base = Mapping[str, Any]
"""What `RunState.base` holds."""


def files_of_base(config: FinetuneConfig, origin: StartingWeights | None) -> WeightFiles:
    """Return the files of the base; refuse a config that has none."""
    if origin is None:
        raise ModelError(
            f"method.type={config.method.type} trains adapters of a model's weights, and model.init=random has none: "
            "set model.init=pretrained and model.path"
        )
    assert isinstance(origin.stored, WeightFiles), "checked when the origin was looked for"
    return origin.stored


def begun_with(config: FinetuneConfig, before: Base | None) -> str | None:
    """Return the hub commit of the base that the run began with, if `model.path` still names that base."""
    return before["revision"] if before is not None and before["path"] == config.model.path else None


def check_base(
    config: FinetuneConfig, network: PreTrainedModel, origin: StartingWeights | None, before: Base | None
) -> None:
    """Check what can be found wrong with a base before ranks start.

    Refuse a run whose adapters could not be exported at its end, and another base by its files' names and sizes.
    """
    if not type(network).__module__.startswith("transformers."):
        raise ModelError(
            f"method.type={config.method.type}: {type(network).__name__} brings code of its own, and adapters are "
            "exported for transformers' own networks only: use method.type=full or freeze"
        )
    # Rows that are trained alone are in PEFT's directory, if the base has a place for them.
    alone = {weight for weight, _ in added_rows_of(network).values()}
    grown = origin is not None and (origin.grown or origin.added.keys() - alone)
    exports = (config.export.at_end or config.export.every is not None) and not config.export.merge
    if exports and config.export.push is not None:
        check_found_by_others(str(config.model.path), config.export.push)
    if grown and exports:
        raise ConfigError(
            "export.merge=false: new tokens (model.add_tokens, model.resize_embeddings) are rows of the base, which "
            "PEFT's directory does not hold: set export.merge=true"
        )
    files = files_of_base(config, origin)
    if before is not None:
        known = {name: each["bytes"] for name, each in before["files"].items()}
        differ = sorted({name for name, _ in files.sizes().items() ^ known.items()})
        if differ:
            raise _changed(config, files, differ[0], before)


def agree_on_base(config: FinetuneConfig, origin: StartingWeights | None, before: Base | None, mode: FillMode) -> Base:
    """Compare the base with what checkpoints recorded `before`, and return what they are to record. Collective.

    With `checkpoint.verify: sizes`, the hashes from before are believed.
    """
    files = files_of_base(config, origin)
    assert origin is not None
    sizes = on_rank0(files.sizes, what="look at the files of the base")
    if before is not None and config.checkpoint.verify != "hashes":
        found = {name: each["xxh3"] for name, each in before["files"].items()}
    else:
        found = digests(files, alone=mode == "rank0")
    added = {name: {str(row): list(like) for row, like in rows.items()} for name, rows in origin.added.items()}
    if before is not None and before["added"] != added:
        raise ResumeError(
            f"model.path={config.model.path}: its tokenizer has other tokens than when this run began, so "
            "model.add_tokens would give the frozen embedding other rows: use the directory that the run began with"
        )
    now = {name: {"bytes": size, "xxh3": found.get(name)} for name, size in sizes.items()}
    if before is not None and now != before["files"]:
        name = next(name for name in sorted({*now, *before["files"]}) if now.get(name) != before["files"].get(name))
        raise _changed(config, files, name, before)
    local = is_local(str(config.model.path))
    return {
        # The path as it is found from any directory.
        "path": str(files.directory) if local else config.model.path,
        # The commit, not the branch whose newest commit it was: others look for the base by it.
        "revision": None if local else commit_of(files.directory) or config.model.revision,
        "files": now,
        "added": added,
    }


def _changed(config: FinetuneConfig, files: WeightFiles, name: str, before: Base) -> ResumeError:
    return ResumeError(
        f"model.path={config.model.path}: {files.directory / name} is not the file that this run's adapters are "
        f"trained on (it began with {before['path']}): restore that one, set model.path to where it is now, or "
        "start again under another run.name"
    )
