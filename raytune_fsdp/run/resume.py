"""Whether a run continues, and from where: what makes it the same run, and the checkpoint it continues from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from transformers import PretrainedConfig

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Damaged, newest
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import dump_config
from raytune_fsdp.data.identity import files_by_key
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import ResumeError, TransientError
from raytune_fsdp.identity import check_identity, named
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.jsonl import read_events
from raytune_fsdp.tracking.tracker import flatten


def identity_of(config: FinetuneConfig, hf_config: PretrainedConfig, train: Windows) -> dict[str, Any]:
    """Everything that decides the trajectory, by the names a user knows. Paths do not decide it; their content does."""
    architecture = {
        f"model.{key}": value
        for key, value in hf_config.to_diff_dict().items()
        if key not in ("transformers_version", "_name_or_path", "dtype", "use_cache")
    }
    optim = named("optim", config.optim, exclude=("schedule_steps", "max_skipped"))
    identity = {
        **architecture,
        **{f"optim.{key}": value for key, value in optim.items()},
        "model.init": config.model.init,
        "model.revision": config.model.revision,
        "method": named("method", config.method),
        "run.seed": config.run.seed,
        "parallel.precision": config.parallel.precision,
        "train.global_batch": config.train.global_batch,
        "train.micro_batch": config.train.micro_batch,
        **{_data_key(key): value for key, value in train.identity.items() if key != "seed"},
    }
    normal: dict[str, Any] = json.loads(json.dumps(identity, default=str))  # as a checkpoint will return it
    return normal


def _data_key(key: str) -> str:
    return f"data.{key.replace('datasets.', 'train.')}"


def files_of(train: Windows) -> dict[str, list[str]]:
    """The names of the files whose hashes are in the identity, by its keys."""
    return {_data_key(key): files for key, files in files_by_key(train.sources).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint to continue from, its state, and the damaged ones passed over. Without one: the beginning."""

    checkpoint: CommittedCheckpoint | None = None
    state: RunState
    damaged: Damaged


def find_resume(
    place: RunDir,
    identity: Mapping[str, Any],
    files: Mapping[str, Sequence[str]],
    *,
    resume: Literal["auto", "always", "never"],
    damaged: Damaged | None = None,
) -> Resumed:
    """The newest whole checkpoint of this run, following `run.resume`; a checkpoint of another run is an error.

    Only the sizes of tensor files are compared here: the ranks hash them together.
    """
    checkpoints = place.checkpoints
    try:
        found, damaged = newest(checkpoints, hashes=False, damaged=damaged)
    except OSError as error:
        raise TransientError(
            f"{checkpoints} cannot be read: {error}; check checkpoint.storage, run.storage and their credentials"
        ) from error
    if found is None:
        _check_never_saved(place)
        if resume == "always":
            raise ResumeError(
                f"run.resume=always, but {checkpoints} has no complete checkpoint: check run.storage and run.name, "
                "or set run.resume=auto to start anew"
            )
        return Resumed(state=RunState(), damaged={})
    if resume == "never":
        raise ResumeError(
            f"run.resume=never, but {checkpoints} has a checkpoint of step {found.step}: choose another run.name, "
            "or set run.resume=auto to continue it"
        )
    state = read_state(found)
    check_identity(state.identity, identity, found.path, files_before=state.files, files_now=files)
    return Resumed(checkpoint=found, state=state, damaged=damaged)


def _check_never_saved(place: RunDir) -> None:
    """Refuse to start a run anew whose checkpoints are not where they should be: its record would be cut."""
    saved = [each["fields"] for each in read_events(place.events) if each["event"] == names.SAVED]
    saved = [fields for fields in saved if {"step", "path"} <= fields.keys()]
    if saved:
        raise ResumeError(
            f"{place.checkpoints} has no checkpoint, but this run has saved step {saved[-1]['step']} as "
            f"{saved[-1]['path']}: mount that storage, or set checkpoint.storage back to it; to start anew, choose "
            f"another run.name or remove {place.path}"
        )


def changed_settings(place: RunDir, config: FinetuneConfig) -> dict[str, list[Any]]:
    """Old and new value of every setting that differs from the run's last attempt. None decides the trajectory."""
    try:
        before = flatten(yaml.safe_load(place.config.read_text()))
    except (OSError, yaml.YAMLError, AttributeError):
        return {}
    now = flatten(yaml.safe_load(dump_config(config)))
    return {key: [before.get(key), now.get(key)] for key in sorted({*before, *now}) if before.get(key) != now.get(key)}
