"""The frozen weights that adapters are trained beside: a run goes on with the very files it began with, or not at all.

A checkpoint of such a run holds the adapters, and of the base its place and the hash of each of its files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.checkpoint.manifest import share_of
from raytune_fsdp.collectives import on_all_ranks, on_rank0
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError, ModelError, ResumeError, TransientError
from raytune_fsdp.model.files import WeightFiles, is_hub_name
from raytune_fsdp.run.initial_weights import Origin, fill_mode

Base = Mapping[str, Any]
"""`RunState.base`."""


def files_of_base(config: FinetuneConfig, origin: Origin | None) -> WeightFiles:
    """The base's files. Refuses one that is no model directory."""
    if origin is None:
        raise ModelError(
            f"method.type={config.method.type} trains beside the weights of a model, and model.init=random has none: "
            "set model.init=pretrained and model.path"
        )
    if not isinstance(origin.stored, WeightFiles):
        raise ModelError(
            f"model.path={config.model.path} is a checkpoint, which its run removes one day, and a run with "
            f"method.type={config.method.type} needs its base for ever: export it, and set model.path to the export"
        )
    return origin.stored


def check_base(config: FinetuneConfig, network: PreTrainedModel, origin: Origin | None, before: Base | None) -> None:
    """What can be found wrong with a base before a rank is started."""
    check_exportable(config, network, origin)
    check_sizes(config, files_of_base(config, origin), before)


def check_exportable(config: FinetuneConfig, network: PreTrainedModel, origin: Origin | None) -> None:
    """Refuse a run whose adapters could not be exported at its end."""
    if not type(network).__module__.startswith("transformers."):
        raise ModelError(
            f"method.type={config.method.type}: {type(network).__name__} brings code of its own, and adapters are "
            "exported for transformers' own networks only: use method.type=full or freeze"
        )
    grown = origin is not None and (origin.grown or origin.added)
    exports = config.export.at_end or config.export.every is not None
    if grown and exports and not config.export.merge:
        raise ConfigError(
            "export.merge=false: new tokens (model.add_tokens, model.resize_embeddings) are rows of the base, which "
            "PEFT's directory does not hold: set export.merge=true"
        )


def check_sizes(config: FinetuneConfig, files: WeightFiles, before: Base | None) -> None:
    """Refuse another base by its files' names and sizes, before a rank is started."""
    if before is None:
        return
    sizes = files.sizes()
    known = {name: each["bytes"] for name, each in before["files"].items()}
    differ = sorted({name for name, _ in sizes.items() ^ known.items()})
    if differ:
        raise _changed(config, files, differ[0], before)


def agree_on_base(config: FinetuneConfig, origin: Origin | None, before: Base | None) -> Base:
    """What checkpoints say about the base, after comparing it with what they said `before`. Collective.

    Every rank hashes a part of the files; with `checkpoint.verify: sizes` the hashes from before are believed.
    """
    files = files_of_base(config, origin)
    assert origin is not None
    alone = fill_mode(config, origin) == "rank0"
    sizes = on_rank0(files.sizes, what="look at the files of the base")
    if before is not None and config.checkpoint.verify != "hashes":
        digests = {name: each["xxh3"] for name, each in before["files"].items()}
    else:
        rank, world = (dist.get_rank(), 1) if alone else (dist.get_rank(), dist.get_world_size())
        mine = share_of(sizes, rank, world) if rank < world else []
        parts = on_all_ranks(lambda: _digests(files, mine))
        digests = {name: digest for part in parts for name, digest in part.items()}
    added = {name: {str(row): list(like) for row, like in rows.items()} for name, rows in origin.added.items()}
    if before is not None and before["added"] != added:
        raise ResumeError(
            f"model.path={config.model.path}: its tokenizer has other tokens than when this run began, so "
            "model.add_tokens would give the frozen embedding other rows: use the directory that the run began with"
        )
    now = {name: {"bytes": size, "xxh3": digests.get(name)} for name, size in sizes.items()}
    if before is not None and now != before["files"]:
        name = next(name for name in sorted({*now, *before["files"]}) if now.get(name) != before["files"].get(name))
        raise _changed(config, files, name, before)
    local = not is_hub_name(str(config.model.path)) or Path(str(config.model.path)).expanduser().is_dir()
    return {
        # As it is found from any directory.
        "path": str(files.directory) if local else config.model.path,
        "revision": None if local else config.model.revision,
        "files": now,
        "added": added,
    }


def _digests(files: WeightFiles, names: Sequence[str]) -> dict[str, str]:
    try:
        return {name: files.digest(name) for name in names}
    except OSError as error:
        raise TransientError(f"{files.directory} could not be read: {error}") from error


def _changed(config: FinetuneConfig, files: WeightFiles, name: str, before: Base) -> ResumeError:
    return ResumeError(
        f"model.path={config.model.path}: {files.directory / name} is not the file that this run's adapters are "
        f"trained beside (it began with {before['path']}): restore that one, set model.path to where it is now, or "
        "start anew under another run.name"
    )
