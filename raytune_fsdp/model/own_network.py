"""A network of the user's own: a function builds it from its config (`model.network`).

Its config.json names the function, so checkpoints and exports say which code they need (directory/needed_code.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from raytune_fsdp.base.errors import ModelError, in_one_line
from raytune_fsdp.data.rows.own_code import OwnCode
from raytune_fsdp.data.sources.source import shorten
from raytune_fsdp.model.directory.bounds import bounded_building
from raytune_fsdp.model.directory.needed_code import ENTRY

KEY = "model.network"


def find_network(name: str, hf_config: PretrainedConfig) -> OwnCode:
    """Return the function that `model.network` names, with the hashes of its code and of modules that it imports.

    Those that it imports only when it is called, too: it builds the network of the run, by its own config, as each
    attempt has it.
    """
    own = OwnCode(KEY, name).found
    there = own.call_elsewhere([{"name": name, "config": hf_config.to_dict()}], by=f"{__name__}:{call.__name__}")
    ((kind, result),) = there.results
    if kind == "raised":
        raise ModelError(f"{own.said}: in a fresh Python process {result[1].removeprefix(f'{own.said}: ')}")
    return replace(own, modules=there.modules)


def call(_: Callable[..., Any], row: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """Build a network in another process, as `elsewhere` calls it."""
    try:
        values = row["config"]
        class_of(row["name"], CONFIG_MAPPING[values["model_type"]].from_dict(values))
    except Exception as error:  # the user's code runs here
        return None, error
    return None, None


def own_config(name: str, hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the network that a function builds from a config; it names the function.

    Refuse a network that others, who have only the config and the class, could not build again.
    """
    with torch.device("meta"), bounded_building():
        network = build_own(name, copy.deepcopy(hf_config), torch.float32)
        found: PretrainedConfig = network.config
        kind, said = type(found).model_type, f"{KEY}={name}"
        if kind in CONFIG_MAPPING_NAMES:
            raise ModelError(
                f"{said}: the config of its network is transformers' own ({type(found).__name__}), so whoever loads "
                f"the export would get transformers' class without a word; give it a config of its own: class "
                f"Config({type(found).__name__}): model_type = 'my_{kind}'"
            )
        if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] is not type(found):
            raise ModelError(
                f"{said}: transformers does not know the config of its network, so config.json could not be read "
                f"again; write into its module AutoConfig.register({kind!r}, {type(found).__name__})"
            )
        setattr(found, ENTRY, name)
        again = build_own(name, copy.deepcopy(found), torch.float32)
        alone = _tried(lambda: type(network)(copy.deepcopy(found)), said)
    for other, what in ((again, "the function builds another network from it"), (alone, "its class alone does")):
        if type(other) is not type(network) or _shapes(other) != _shapes(network):
            raise ModelError(
                f"{said}: given the config of its network, {what}: keep everything that decides the network in its "
                "config, and build it in the __init__ of its class"
            )
    return found


def build_own(
    name: str, hf_config: PretrainedConfig, dtype: torch.dtype, attention: str | None = None
) -> PreTrainedModel:
    """Build the network of a config by the user's function, with weights of this type."""
    function, said = OwnCode(KEY, name).load(), f"{KEY}={name}"
    hf_config.dtype = dtype
    if attention is not None:
        hf_config._attn_implementation = attention
    with _default_dtype(dtype):
        made = _tried(lambda: function(hf_config), said)
    if not isinstance(made, PreTrainedModel):
        raise ModelError(
            f"{said}: it returned {shorten(made)}, must be a transformers.PreTrainedModel: checkpoints, exports and "
            "sharding know its parts by that class's rules; make your module a subclass of it"
        )
    wanted = torch.get_default_device()
    elsewhere = [key for key, tensor in made.named_parameters() if tensor.device.type != wanted.type]
    if elsewhere:
        raise ModelError(
            f"{said}: it made {elsewhere[0]} on {made.get_parameter(elsewhere[0]).device.type}, must leave the device "
            "to the caller: a network is built without memory first, and filled afterwards; load no weights in it"
        )
    if made.get_input_embeddings() is None or made.get_output_embeddings() is None:
        raise ModelError(
            f"{said}: {type(made).__name__} does not say which module is its embedding and which its head: define "
            "get_input_embeddings and get_output_embeddings"
        )
    return made


def class_of(name: str, hf_config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the network that a function builds from a config."""
    with torch.device("meta"), bounded_building():
        return type(build_own(name, copy.deepcopy(hf_config), torch.float32))


def name_class(hf_config: PretrainedConfig, network: PreTrainedModel) -> None:
    """Name a network's class in its config, for those who load the exported model."""
    hf_config.architectures = [type(network).__name__]  # missing in configs written by hand or of the bare decoder
    others = type(network).__module__.startswith("transformers.") or hasattr(hf_config, ENTRY)
    if others and hasattr(hf_config, "auto_map"):
        del hf_config.auto_map  # it would load other code; this network is transformers' or the user's own


def _tried(make: Callable[[], Any], said: str) -> Any:
    try:
        return make()
    except ModelError:
        raise
    except Exception as error:  # the user's code runs here
        raise ModelError(f"{said}: it raised {in_one_line(error)}") from error


def _shapes(network: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
