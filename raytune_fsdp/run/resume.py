"""Whether a run continues, and from where: what makes it the same run, and the checkpoint to continue from."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash
import yaml
from pydantic import ValidationError
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.errors import RaytuneError, ResumeError, TransientError, in_one_line
from raytune_fsdp.base.redaction import redact_shapes
from raytune_fsdp.base.untrusted import read_file, shown
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Damaged, committed, newest
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.recorded import recorded
from raytune_fsdp.config.sections.method import unordered
from raytune_fsdp.config.text import MAX_BYTES, parse, problem_line, spelled
from raytune_fsdp.data.identity import files_by_key
from raytune_fsdp.data.rows.own_code import OwnCode
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.adapters.attach import adapted_modules, adapter_tensors, base_name
from raytune_fsdp.model.adapters.targets import is_expression
from raytune_fsdp.model.directory.known_files import code_files
from raytune_fsdp.model.directory.needed_code import ENTRY
from raytune_fsdp.model.objective.own_loss import find_loss
from raytune_fsdp.model.own_network import KEY as NETWORK
from raytune_fsdp.model.own_network import find_network
from raytune_fsdp.plan.identity import ABSENT, check_identity, named
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.tracker import flatten
from raytune_fsdp.run.beginning import beginning_of
from raytune_fsdp.run.forks.changes import FORK, MAY_CHANGE, with_allowed
from raytune_fsdp.run.forks.parent import Fork, Parent, parent_of

logger = logging.getLogger(__name__)

_MOST_NAMED, _NAMES_BYTES = 100_000, 8 << 20
"""The most files that a checkpoint names next to their hashes, and the most characters of all names: they could take
more room than the rest of its state. Without them, a message about other data says only which dataset it is."""

_LENGTH = ("max_steps", "epochs", "log_every")
_CODE = "model.code."


def identity_of(
    config: FinetuneConfig,
    hf_config: PretrainedConfig,
    train: Windows,
    own: Sequence[OwnCode] = (),
    code: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return everything that decides the trajectory, by names a user knows: the content of files, not their paths.

    `own`: code of the user's that the run needs, besides functions that make rows. `code`: see `code_of_model`.
    """
    architecture = {
        f"model.{key}": value
        for key, value in hf_config.to_diff_dict().items()
        if key not in ("transformers_version", "_name_or_path", "dtype", "use_cache", ENTRY)
    }
    # In one spelling: moments in fp32 with weights in fp32 are the same run either way.
    chosen, wide = config.optim.optimizer, config.parallel.precision in ("bf16", "fp16", "fp32", "fp8")
    if not (chosen.type == "adamw" and chosen.moments == "fp32" and wide):
        meant = config.optim
    else:
        meant = config.optim.model_copy(update={"optimizer": chosen.model_copy(update={"moments": "as_weights"})})
    optim = named("optim", meant, exclude=("schedule_steps", "max_skipped"))
    added = [token.model_dump() for token in config.model.add_tokens]
    # Weights that travel in 8 bits come out the same.
    fp8 = {"parallel.fp8_scaling": config.parallel.fp8_scaling} if config.parallel.precision == "fp8" else {}
    identity = {
        **architecture,
        **{f"optim.{key}": value for key, value in optim.items()},
        "model.init": config.model.init,
        "model.revision": config.model.revision,
        **({"model.network": config.model.network} if config.model.network != ABSENT["model.network"] else {}),
        **({"model.add_tokens": added} if added != ABSENT["model.add_tokens"] else {}),
        "method": named("method", config.method, exclude=("adapter",)),  # its values decide, not its path
        "run.seed": config.run.seed,
        **({"run.exact": True} if config.run.exact != ABSENT["run.exact"] else {}),
        "parallel.precision": config.parallel.precision,
        **fp8,
        **({"parallel.reduce_dtype": "bf16"} if config.parallel.reduce_dtype == "bf16" else {}),
        **{f"train.{key}": value for key, value in named("train", config.train, exclude=_LENGTH).items()},
        **{key: value for each in own for key, value in each.identity.items()},
        **(code or {}),
        **_reference(config),
        **_teacher(config),
        **data_identity_of(train),
    }
    return _normal(identity)


def _reference(config: FinetuneConfig) -> dict[str, Any]:
    """Return the entries for what an objective compares with, as far as the config decides it."""
    chosen, found = config.reference, {}
    if config.train.objective.compares:
        if chosen.model is not None:
            found["reference.model"] = chosen.model if chosen.model == "base" else "another model"  # its values decide
        if chosen.when != "before":
            found["reference.when"] = chosen.when
    return found


def _teacher(config: FinetuneConfig) -> dict[str, Any]:
    """Return the entries for what is asked of a teacher. Which model it is, its values decide."""
    teacher = config.teacher
    if teacher is None:
        return {}
    dtype = teacher.kept_in(config.parallel.precision)  # in one spelling
    return {"teacher.top_k": teacher.top_k, "teacher.temperature": teacher.temperature, "teacher.dtype": dtype}


def own_code(config: FinetuneConfig, hf_config: PretrainedConfig) -> tuple[OwnCode, ...]:
    """Return the code of the user's that the config names, tried, with its hashes; not functions that make rows."""
    found = [] if config.train.loss is None else [find_loss(config.train.loss, config.train.loss_columns)]
    return tuple(found if config.model.network is None else [*found, find_network(config.model.network, hf_config)])


def code_of_model(config: FinetuneConfig, directory: Path | None, found: Resumed) -> dict[str, str]:
    """Return the entries for Python code that comes with the model, if it may run.

    Runs that were begun when no identity had them go on without.
    """
    if not config.model.trust_remote_code or directory is None:
        return {}
    if found.checkpoint is not None and not any(key.startswith(_CODE) for key in found.state.identity):
        return {}
    return code_in(directory)


def code_in(directory: Path) -> dict[str, str]:
    """Return the hashes of the Python code in a model's directory, as an identity names them."""
    return {f"{_CODE}{name}": xxhash.xxh3_128_hexdigest(text) for name, text in files_of_code(directory).items()}


def files_of_code(directory: Path) -> dict[str, bytes]:
    """Return the Python files in a model's directory that its configs name, by their names."""
    return {name: (directory / name).read_bytes() for name in code_files(directory, links=True)}


def code_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an identity for the code of the model: what comes with it, or the user's network."""
    return {key: value for key, value in identity.items() if key.startswith((_CODE, f"{NETWORK}_"))}


def data_identity_of(train: Windows) -> dict[str, Any]:
    """Return the part of the identity that decides the order of the samples, but for the seed."""
    known = ("seed", "columns", "over_all")  # as train.loss_columns and train.objective
    return _normal({_data_key(key): value for key, value in train.identity.items() if key not in known})


def _normal(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as a checkpoint will return it, and without what may not be in one."""
    normal: dict[str, Any] = redact_shapes(json.loads(json.dumps(identity, default=str)))
    return normal


def _data_key(key: str) -> str:
    return f"data.{key.replace('datasets.', 'train.')}"


def files_of(train: Windows) -> dict[str, list[str]]:
    """Return the names of the files whose hashes are in the identity, by its keys; none if there are too many."""
    found = {_data_key(key): files for key, files in files_by_key(train.sources).items()}
    named = sum(map(len, found.values())) <= _MOST_NAMED
    return found if named and sum(len(name) for files in found.values() for name in files) <= _NAMES_BYTES else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint to continue from, its state, and the damaged ones passed over; without one, the beginning."""

    checkpoint: CommittedCheckpoint | None = None
    state: RunState
    damaged: Damaged
    adapters: Sequence[str] | None = None
    """Without a checkpoint: the `adapted_modules` with which the run has to begin, if they are known."""
    parent: Parent | None = None
    """The run whose checkpoint it is, if that is another one: a fork begins."""


def find_resume(
    place: RunDir,
    *,
    resume: Literal["auto", "always", "never"],
    damaged: Damaged | None = None,
    fork: Fork | None = None,
    trusted: bool = True,
) -> Resumed:
    """Return the newest whole checkpoint in the run's directory, following `run.resume`; then call `check_same_run`.

    Only the sizes of tensor files are compared here: the ranks hash them together. If the run has none, a `fork` begins
    with one of its parent. `trusted`: that may be followed to places outside of its directory.
    """
    checkpoints = place.checkpoints
    try:
        found, passed_over = newest(checkpoints, hashes=False, damaged=damaged)
    except OSError as error:
        raise TransientError(
            f"{checkpoints} cannot be read: {error}; check checkpoint.storage, run.storage and their credentials"
        ) from error
    if found is None:
        # A run from scratch whose checkpoints are not where they should be would cut its record.
        saved = [each["fields"] for each in read_events(place.events) if each["event"] == names.SAVED]
        saved = [fields for fields in saved if {"step", "path"} <= fields.keys()]
        if saved:
            raise ResumeError(
                f"{place.checkpoints} has no checkpoint, but this run has saved step {saved[-1]['step']} as "
                f"{saved[-1]['path']}: mount that storage, or set checkpoint.storage back to it; to start again, "
                f"choose another run.name or remove {place.path}"
            )
        if resume == "always":
            raise ResumeError(
                f"run.resume=always, but {checkpoints} has no complete checkpoint: check run.storage and run.name, "
                "or set run.resume=auto to start from scratch"
            )
        if fork is not None:
            parent = parent_of(place, fork, trusted=trusted)
            return Resumed(checkpoint=parent.checkpoint, state=parent.state(), damaged={}, parent=parent)
        state, adapters = beginning_of(place)
        return Resumed(state=state, damaged={}, adapters=adapters)
    if resume == "never":
        raise ResumeError(
            f"run.resume=never, but {checkpoints} has a checkpoint of step {found.step}: choose another run.name, "
            "or set run.resume=auto to continue it"
        )
    return Resumed(checkpoint=found, state=read_state(found), damaged=passed_over)


def next_attempt(place: RunDir) -> int:
    """Return the number of the attempt that begins now."""
    # From events and checkpoints, as either may have been removed: a number used twice could give two checkpoints the
    # same name.
    earlier = [line["attempt"] for line in read_events(place.events)]
    earlier += [checkpoint.attempt for checkpoint in committed(place.checkpoints)]
    return 1 + max(earlier, default=0)


def check_same_run(found: Resumed, identity: Mapping[str, Any], files: Mapping[str, Sequence[str]]) -> None:
    """Refuse to continue from a checkpoint of another run, unless a fork may."""
    if found.checkpoint is not None:
        before = redact_shapes(found.state.identity)
        if isinstance(before.get("method"), dict):
            before["method"] = {key: unordered(key, value) for key, value in before["method"].items()}
        where, rule = found.checkpoint.path, None
        if found.parent is not None:
            if identity[FORK]["digest"] != found.parent.digest:
                raise TransientError(f"{where} was replaced by another one while this run was prepared; begin again")
            before = with_allowed(before, identity)
            rule = f"{where}: {MAY_CHANGE}; set the rest back, or leave run.fork out:"
        check_identity(before, identity, where, files_before=found.state.files, files_now=files, rule=rule)


def adapted_before(found: Resumed) -> Sequence[str] | None:
    """Return the modules that have adapters in a run that goes on; None: it begins now, or has none.

    A newer version may mean other modules by `all-linear`. All checkpoints of a run have the same ones.
    """
    if found.checkpoint is None:
        return found.adapters or None
    for each in reversed(committed(found.checkpoint.root)):
        with suppress(RaytuneError):  # damaged: the ranks look for another one together
            return adapted_modules(CheckpointWeights(each).shapes()) or None
    return None


def check_same_adapters(found: Resumed, config: FinetuneConfig, network: PreTrainedModel) -> None:
    """Refuse to continue with fewer adapters than a run has: older versions took an expression for last names."""
    targets = getattr(config.method, "target_modules", None)
    if not is_expression(targets):
        return
    if found.checkpoint is None:
        if found.adapters not in (None, adapted_modules(adapter_tensors(network))):
            raise ResumeError(
                f"method.target_modules={shown(targets)}: the run adapted other modules than the expression matches, "
                "as an older version took it for last names: only that version can train its steps again"
            )
        return
    try:
        held = CheckpointWeights(found.checkpoint).shapes().keys()
    except RaytuneError:  # damaged: the ranks look for another one together
        return
    left = sorted({_module_of(name) for name in held - adapter_tensors(network).keys()})
    if left:
        ends = {name.rpartition(".")[2] for name in map(_module_of, held) if re.fullmatch(str(targets), name)}
        raise ResumeError(
            f"method.target_modules={shown(targets)}: this run adapts {left[0]} (and {len(left) - 1} more that the "
            "expression does not match), as an older version took it for last names: to train all of them on, export "
            "the run, and begin another run.name with method.adapter=EXPORT and "
            f"method.target_modules=[{', '.join(sorted(ends))}]; to train what it says, begin another run.name"
        )


def _module_of(name: str) -> str:
    """Return the module that a tensor of LoRA adapts."""
    return base_name(name.partition(".lora_")[0])


def changed_settings(place: RunDir, config: FinetuneConfig) -> dict[str, list[Any]]:
    """Return the old and the new value of every setting that differs from the run's last attempt.

    None of these settings decides the trajectory. Values are without secrets: another secret in the same place is no
    change.
    """
    tree = last_config(place)
    if not tree:
        return {}
    with suppress(ValidationError):  # a value that is hidden, or a field that is gone
        tree = FinetuneConfig.model_validate(tree).model_dump()  # newer fields at their defaults are no change
    before = flatten(recorded(tree))
    now = flatten(recorded(config.model_dump()))
    return {key: [before.get(key), now.get(key)] for key in sorted({*before, *now}) if before.get(key) != now.get(key)}


def last_config(place: RunDir) -> dict[str, Any]:
    """Return the config.yaml of the run's last attempt as a tree; an empty one if none can be read."""
    try:
        tree = spelled(parse(read_file(place.config, limit=MAX_BYTES, links=True).decode())[0])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = problem_line(error) if isinstance(error, yaml.YAMLError) else in_one_line(error)
        logger.warning("%s cannot be read, so no changed setting is reported: %s", place.config, reason)
        return {}
    return tree if isinstance(tree, dict) else {}
