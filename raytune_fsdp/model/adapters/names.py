"""What an adapter is called in PEFT's directory: by the names of the class that its base's config names.

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
from raytune_fsdp.model.directory.named_class import Named
from raytune_fsdp.model.weights.source import Weights

_PEFT = "base_model.model."
"""Before every name in PEFT's files."""


def keys_there(network: PreTrainedModel, named: Named, *, outside: bool = False) -> dict[str, str]:
    """The key in PEFT's file of every tensor of an adapter, by its name in the network that it was trained in.

    Without those of parts that see or hear, unless they do something (`outside`): their last names are those of the
    language model's layers, so they get an adapter where the run trains the whole class.
    """
    keys = {name: f"{_PEFT}{named.there(key.removeprefix(_PEFT))}" for name, key in stored_names(network).items()}
    kept = {name: key for name, key in keys.items() if outside or not named.sees(key.removeprefix(_PEFT))}
    return kept or keys


def acts_outside(named: Named, adapter: Weights, initial: Weights) -> bool:
    """Whether adapters of parts that see or hear do something: those that a run began with, as training on texts leaves
    them as they began. `initial`: what they began as, if that was taken out of the base."""
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
    """The value of a tensor with which an adapter changes nothing; empty if another one of it has to have that."""
    if ".lora_B." in name or ".lora_embedding_A." in name:
        return (0.0,)
    return (1.0,) if ".ia3_l." in name else ()


def keys_held(network: PreTrainedModel, named: Named, held: Iterable[str]) -> dict[str, str]:
    """The same, in the words of a file with the keys `held`, which may be of an older version."""
    held = set(held)
    return max(
        (keys_there(network, named), stored_names(network)), key=lambda keys: len(held.intersection(keys.values()))
    )


def own_names(named: Named) -> Callable[[str], str]:
    """From the name of a module or tensor in PEFT's files, of either naming, to that in the run's network."""
    return lambda name: (None if named.is_own else named.here(name.removeprefix(_PEFT))) or name.removeprefix(_PEFT)


def targets_there(
    network: PreTrainedModel, named: Named, written: Mapping[str, Any], *, outside: bool
) -> dict[str, Any]:
    """What PEFT's config says so that the named class gets these adapters and no others.

    `written`: the config of the run. `outside`: as in `keys_there`. The last names of modules are kept where they mean
    the same there, with what is to be left out; else the modules have their whole names.
    """
    targets, saved = written.get("target_modules"), written.get("modules_to_save")
    if named.is_own and (outside or not named.outside):
        return {"target_modules": targets}
    modules = [name for name, _ in named.network.named_modules()]
    # Absent, they are PEFT's choice for the class, which for the run's was none.
    found: dict[str, Any] = {"target_modules": [] if targets is None else targets}
    copies = [name for name in modules if isinstance(saved, list) and name.endswith(tuple(saved))]  # as PEFT finds them
    if any(map(named.sees, copies)):
        found["modules_to_save"] = [name for name in copies if not named.sees(name)]
    adapted = {name for name, module in network.named_modules() if is_adapter_layer(module)}
    # Around a weight alone: PEFT finds those by target_parameters.
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
        # As an expression: a vision tower has hundreds of modules with these names.
        found["exclude_modules"] = rf"({'|'.join(map(re.escape, parts))})\..*"
    return found


def _ending(modules: Iterable[str], ends: list[str]) -> list[str]:
    """The names that PEFT takes a list of targets for."""
    return [name for name in modules if name in ends or name.endswith(tuple(f".{each}" for each in ends))]


def check_loads(directory: Path, named: Named, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Have PEFT load the keys of an adapter's file into the named class, without values: all of them, and no more.

    On the meta device, so that it takes names and shapes only, whatever the size of the model.
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
    except Exception as error:  # of whatever PEFT cannot do with them
        raise _not_loaded(named, first_line(error)) from error
    tensors = dict(model.named_parameters(remove_duplicate=False))
    lacking = {key for key in found.missing_keys if ADAPTER in key.split(".")}
    # Rows of a head that is the embedding are stored once.
    loaded = {id(tensor) for key, tensor in tensors.items() if key not in lacking}
    missing = [key for key in sorted(lacking) if id(tensors.get(key)) not in loaded]
    if missing or found.unexpected_keys:
        key = [*missing, *found.unexpected_keys][0]
        raise _not_loaded(named, f"it {'lacks' if missing else 'does not know'} {key}")


def _not_loaded(named: Named, why: str) -> ModelError:
    return ModelError(
        f"PEFT cannot load this adapter into a {type(named.network).__name__}, the class that the base's config names "
        f"({why}), so nothing was exported: merge it (export.merge=true, or raytune-fsdp export --merge)"
    )
