"""Translate an adapter's names to those in PEFT's directory: the names of the class that its base's config names.

Older versions wrote the names of the class that was trained, which the other class does not have. Both are read.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ModelError, first_line
from raytune_fsdp.model.adapters.attach import ADAPTER, base_name, is_adapter_layer, stored_names
from raytune_fsdp.model.directory.named_class import NamedClass
from raytune_fsdp.model.weights.source import Weights

_PEFT = "base_model.model."
"""Prefix of every name in PEFT's files."""


def keys_there(network: PreTrainedModel, named: NamedClass, *, outside: bool = False) -> dict[str, str]:
    """Return the key in PEFT's file of every tensor of an adapter, by its name in the network that was trained.

    Tensors of parts that see or hear are left out unless they do something (`outside`): the last parts of their names
    are those of the language model's layers, so they get an adapter where the run trains the whole class.
    """
    keys = {name: f"{_PEFT}{named.there(key.removeprefix(_PEFT))}" for name, key in stored_names(network).items()}
    kept = {name: key for name, key in keys.items() if outside or not named.sees(key.removeprefix(_PEFT))}
    return kept or keys


def acts_outside(named: NamedClass, adapter: Weights, initial: Weights) -> bool:
    """Return whether adapters of parts that see or hear do something.

    Only adapters that a run began with can: training on texts leaves them as they began. `initial`: their initial
    values, if these were taken out of the base.
    """
    began, shapes = initial.shapes(), adapter.shapes()
    for name in (name for name in shapes if named.sees(named.there(name))):
        if not (neutral := _neutral(name)) and name not in began:
            continue
        now = adapter.read(name, 0, shapes[name][0])
        then = initial.read(name, 0, shapes[name][0]) if name in began else torch.full_like(now, neutral[0])
        if not torch.equal(now, then):
            return True
    return False


def _neutral(name: str) -> tuple[float, ...]:
    """Return the value of this tensor with which its adapter changes nothing; empty if another tensor decides that."""
    if ".lora_B." in name or ".lora_embedding_A." in name:
        return (0.0,)
    return (1.0,) if ".ia3_l." in name else ()


def keys_held(network: PreTrainedModel, named: NamedClass, held: Iterable[str]) -> dict[str, str]:
    """Return every tensor's key by its name, in the naming (ours or an older one) of a file with the keys `held`."""
    held = set(held)
    return max(
        (keys_there(network, named), stored_names(network)), key=lambda keys: len(held.intersection(keys.values()))
    )


def own_names(named: NamedClass) -> Callable[[str], str]:
    """Return a function from a name in PEFT's files (module or tensor, either naming) to that in the run's network."""
    return lambda name: named.here(name.removeprefix(_PEFT)) or name.removeprefix(_PEFT)


def targets_there(
    network: PreTrainedModel, named: NamedClass, written: Mapping[str, Any], *, outside: bool
) -> dict[str, Any]:
    """Return the fields of PEFT's config with which the named class gets these adapters and no others.

    `written`: the config of the run. `outside`: as in `keys_there`. The last parts of modules' names are kept if they
    mean the same in the named class, with what is to be left out; otherwise the modules are listed by whole names.
    """
    targets, saved = written.get("target_modules"), written.get("modules_to_save")
    if named.is_own and (outside or not named.outside):
        return {"target_modules": targets}
    modules = [name for name, _ in named.network.named_modules()]
    # If targets were absent, PEFT would choose them for the named class; for the run's class it chose none.
    found: dict[str, Any] = {"target_modules": [] if targets is None else targets}
    copies = [name for name in modules if isinstance(saved, list) and name.endswith(tuple(saved))]  # as PEFT finds them
    if any(map(named.sees, copies)):
        found["modules_to_save"] = [name for name in copies if not named.sees(name)]
    adapted = {name for name, module in network.named_modules() if is_adapter_layer(module)}
    # Adapters around a single weight: PEFT finds these by target_parameters.
    alone = {name for name in adapted if type(network.get_submodule(name)).__name__ == "ParamWrapper"}
    there = {named.there(base_name(name)) for name in adapted - alone}
    wanted = {name for name in there if not named.sees(name)} or there
    if not wanted:
        return found
    ending = _ending(modules, targets) if isinstance(targets, list) else []
    parts = [part for part in named.outside if any(name.startswith(f"{part}.") for name in {*ending} - wanted)]
    left = {name for name in ending if not any(name.startswith(f"{part}.") for part in parts)}
    if left != wanted:
        found["target_modules"] = sorted(wanted)
        if isinstance(within := written.get("feedforward_modules"), list):
            found["feedforward_modules"] = sorted(_ending(wanted, within))
    elif parts:
        # An expression, because a vision tower has hundreds of modules with these names.
        found["exclude_modules"] = rf"({'|'.join(map(re.escape, parts))})\..*"
    return found


def _ending(modules: Iterable[str], ends: list[str]) -> list[str]:
    """Return the modules that PEFT adapts for this list of targets."""
    return [name for name in modules if name in ends or name.endswith(tuple(f".{each}" for each in ends))]


def check_loads(directory: Path, named: NamedClass, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that PEFT can load the keys of an adapter's file into the named class: all of them, and no others.

    It is done on the meta device, without values, so that it needs only names and shapes, whatever the model's size.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(directory))
            model = PeftModel(named.fresh(), config)
            held = {key: torch.empty(shape) for key, shape in shapes.items()}
            found: Any = set_peft_model_state_dict(model, held)
    except ModelError:
        raise
    except Exception as error:  # whatever PEFT raises
        raise _not_loaded(named, first_line(error)) from error
    tensors = dict(model.named_parameters(remove_duplicate=False))
    lacking = {key for key in found.missing_keys if ADAPTER in key.split(".")}
    # Rows of a head that shares the embedding's weight are stored once.
    loaded = {id(tensor) for key, tensor in tensors.items() if key not in lacking}
    missing = [key for key in sorted(lacking) if id(tensors.get(key)) not in loaded]
    if missing or found.unexpected_keys:
        key = [*missing, *found.unexpected_keys][0]
        raise _not_loaded(named, f"it {'lacks' if missing else 'does not know'} {key}")


def _not_loaded(named: NamedClass, why: str) -> ModelError:
    return ModelError(
        f"PEFT cannot load this adapter into a {type(named.network).__name__}, the class that the base's config names "
        f"({why}), so nothing was exported: merge it (export.merge=true, or raytune-fsdp export --merge)"
    )
