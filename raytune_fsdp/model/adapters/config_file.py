"""Read and write `adapter_config.json`, which PEFT and inference servers read, and which may come from a stranger."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ModelError, first_line
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config.sections.method import AdapterMethod, Ia3Method, LoraMethod
from raytune_fsdp.model.adapters.attach import ADAPTER, base_name
from raytune_fsdp.model.directory.files import commit_of
from raytune_fsdp.model.directory.known_files import ADAPTER_CONFIG_FILE, check_links, read_object

_OF_MODULE = re.compile(r"(?:base_model\.model\.)?(.+?)\.(?:lora_|ia3_l)")
"""Matches the name of an adapter's tensor, here or in PEFT's files; finds the module that it adapts."""

_LORA = {
    "r": "rank",
    "lora_alpha": "alpha",
    "use_rslora": "rank_stabilized",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save",
    "use_dora": "dora",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "alpha_pattern": (None, {}),
    "rank_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "use_qalora": (None, False),
    "qalora_group_size": (None, 16),
    # Other values change the base's weights.
    "init_lora_weights": (None, True, False, "gaussian"),
}
"""Fields of PEFT's config that would make the adapter another function, with the values that do not."""

_ABOUT = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision", "task_type",
    # How a linear layer is stored, which follows from the network here.
    "fan_in_fan_out",
    # About initializing a new adapter, about other libraries, and about names.
    "eva_config", "corda_config", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core",
    "init_ia3_weights", "layers_pattern", "ensure_weight_tying", "runtime_config",
    # A module that is left out has no tensors.
    "exclude_modules",
}  # fmt: skip
"""Fields that do not change what the adapter computes."""

_MOST_NAMES, _LONGEST = 5_000, 2_000
"""PEFT compares every two names: 5,000 take 1.4 s, 20,000 take 34 s. A network of 126 layers has 882 linear layers."""

_IA3 = {name: name for name in ("target_modules", "feedforward_modules", "modules_to_save")}
_KINDS: dict[str, tuple[type[LoraMethod] | type[Ia3Method], dict[str, str]]] = {
    "LORA": (LoraMethod, _LORA),
    "IA3": (Ia3Method, _IA3),
}
"""For PEFT's name of a kind, the method, and the method's names for the fields of PEFT's config."""


def put_adapter_config(network: PreTrainedModel, directory: Path, **more: Any) -> None:
    """Write the `adapter_config.json` that PEFT and inference servers read, with the fields of `more`."""
    network.peft_config[ADAPTER].save_pretrained(directory)  # type: ignore[union-attr, operator]
    values = read_object(directory / ADAPTER_CONFIG_FILE)
    # PEFT writes sets, in another order each time.
    values |= {
        key: sorted(value) for key, value in values.items() if key in {*_LORA, *_IA3} and isinstance(value, list)
    }
    values |= more
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """Read an adapter's own config. In the hub's cache every file is a link; in other places none may be."""
    file, cached = directory / ADAPTER_CONFIG_FILE, commit_of(directory) is not None
    if cached:
        check_links(file)
    return read_object(file, links=cached)


def adapter_instead(path: str, directory: Path) -> ModelError | None:
    """Return what to do with an adapter that `model.path` names; None if the directory is not one of an adapter."""
    if not (directory / ADAPTER_CONFIG_FILE).is_file():
        return None
    values = read_adapter_config(directory)
    kind, base = "ia3" if values.get("peft_type") == "IA3" else "lora", values.get("base_model_name_or_path")
    named = f" ({ADAPTER_CONFIG_FILE} names {shown(base)})" if isinstance(base, str) and base else ""
    return ModelError(
        f"model.path={path} is an adapter, no model: set method.type={kind}, method.adapter={path} and model.path to "
        f"its base{named}, or merge the two (`raytune-fsdp export RUN DIRECTORY --merge` does so for a run of this "
        "package) and set model.path to that directory"
    )


def adapter_method(
    directory: Path, held: Iterable[str], own: Callable[[str], str] = lambda name: name
) -> AdapterMethod:
    """Return the method in a directory's `adapter_config.json`, read by our own rules: it may be a stranger's.

    `held`: the names of the adapter's tensors. Where the config has an expression, these names tell what it matched: to
    search with a stranger's expression may take forever. `own` turns the file's names into those of the network, if
    they differ.
    """
    file, values = directory / ADAPTER_CONFIG_FILE, read_adapter_config(directory)
    if str(values.get("peft_type")) not in _KINDS:
        raise ModelError(
            f"{file}: adapters of the kind {values.get('peft_type')!r} are not known here: use LORA or IA3"
        )
    kind, fields = _KINDS[values["peft_type"]]
    for key, value in values.items():
        if key not in fields and key not in _ABOUT and value not in _NEUTRAL.get(key, (None, False, [], {})):
            raise ModelError(
                f"{file}: {key[:100]}={shown(value)} is not known here, and would be left out; merge it with PEFT"
            )
    for key in fields:
        found = values.get(key)
        names = found if isinstance(found, list) else [found]
        if len(names) > _MOST_NAMES or any(isinstance(name, str) and len(name) > _LONGEST for name in names):
            raise ModelError(
                f"{file}: {key} has {len(names):,} names, or one of more than {_LONGEST} characters; a network has at "
                f"most {_MOST_NAMES:,}"
            )
    known = {ours: values[theirs] for theirs, ours in fields.items() if values.get(theirs) is not None}
    if kind is LoraMethod:
        known = {"target_modules": [], **known}  # where it is absent, PEFT's default is none, ours all-linear
    if isinstance(known.get("target_modules"), str) or values.get("exclude_modules"):
        known["target_modules"] = _adapted(held, known.get("target_parameters"))
    for field in ("target_modules", "modules_to_save", "feedforward_modules"):
        if isinstance(known.get(field), list):
            known[field] = [own(name) if isinstance(name, str) else name for name in known[field]]
    try:
        return kind.model_validate({"type": values["peft_type"].lower(), **known})
    except ValidationError as error:
        raise ModelError(f"{file} is not the config of an adapter ({first_line(error)}): restore it") from error


def _adapted(held: Iterable[str], parameters: object) -> list[str]:
    """Return the modules that an adapter has tensors for, except those of which it adapts only a single weight."""
    matches = filter(None, map(_OF_MODULE.match, held))
    found = {base_name(match[1]) for match in matches}
    owners = [str(each).rpartition(".")[0] for each in parameters] if isinstance(parameters, list) else []
    return sorted(name for name in found if not any(owner and f".{name}".endswith(f".{owner}") for owner in owners))
