"""Find the class that a base's own config names, if a run trains only a part of it: a seeing model's language model.

PEFT and inference servers build that class when they load what a run has written, and the same modules have other names
in it: `model.layers.0` of a Qwen3_5ForCausalLM is `model.language_model.layers.0` of a Qwen3_5ForConditionalGeneration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from raytune_fsdp.base.errors import ModelError, first_line
from raytune_fsdp.model.added_rows import name_in
from raytune_fsdp.model.directory.bounds import bounded_building, check_buffers, read_config
from raytune_fsdp.model.directory.needed_code import function_in
from raytune_fsdp.model.directory.quantization import make_plain
from raytune_fsdp.model.directory.scoring import SCORE, kind_for, kind_of, no_class_for
from raytune_fsdp.model.score_head import name_of_head

Kind = type[PreTrainedModel]


def built_on_meta(directory: Path, make: Callable[[PretrainedConfig], PreTrainedModel]) -> PreTrainedModel | None:
    """Return what `make` builds from a directory's config.json, on the meta device; None if it needs its own code."""
    values = read_config(directory)
    if "auto_map" in values or function_in(values) is not None or values.get("model_type") not in CONFIG_MAPPING:
        return None
    try:
        with torch.device("meta"), bounded_building():
            hf_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            make_plain(hf_config)
            model = make(hf_config)
    except ModelError:
        raise
    except Exception as error:  # its checks may raise anything
        raise ModelError(
            f"{directory / 'config.json'} is not a config that the installed transformers accepts: {first_line(error)}"
        ) from error
    check_buffers(model)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedClass:
    """A network of the class that a base's config names, and where the modules of a run's network are in it."""

    network: PreTrainedModel
    """On the meta device."""
    files: Path
    """The directory whose config.json has its sizes."""
    places: Mapping[str, str]
    """Names of modules in the named class, by the names of the same modules in the run's network. All other names
    follow from these."""
    outside: tuple[str, ...]
    """Names of the parts of the named class that see or hear: a text never reaches them."""
    unbuilt: str | None = None
    """Why the run's own class is used, although the base's config names another one."""

    @property
    def is_own(self) -> bool:
        """Whether the named class has all modules, but for a head that scores, under the names of the run's."""
        return self.places.get("") == ""

    def there(self, name: str) -> str:
        """Return the name in the named class of a module or tensor of the run's network."""
        return _moved(name, self.places) or name

    def here(self, name: str) -> str | None:
        """Return the name in the run's network of a module or tensor of the named class; None if it is not in it."""
        return _moved(name, {there: own for own, there in self.places.items()})

    def sees(self, name: str) -> bool:
        """Return whether a module or tensor of the named class belongs to a part that no text reaches."""
        return any(_inner(name, part) is not None for part in self.outside)

    @property
    def outputs(self) -> int | None:
        """How many numbers its head returns for a text; None: it predicts tokens."""
        head = getattr(self.network, SCORE, None)
        return head.out_features if isinstance(head, nn.Linear) else None

    def fresh(self) -> PreTrainedModel:
        """Build another network of the class, on the meta device."""
        return network_of(self.files, type(self.network), self.outputs)


def network_of(files: Path, kind: Kind, outputs: int | None = None) -> PreTrainedModel:
    """Build a network of one of transformers' classes on the meta device, with the sizes of `files`' config.json.

    `outputs`: how many numbers its head returns, if it is a class that scores.
    """

    found = built_on_meta(files, lambda hf_config: kind._from_config(config_for(kind, hf_config, outputs)))
    assert found is not None, f"{files} has been built before"
    return found


def config_for(kind: Kind, hf_config: PretrainedConfig, outputs: int | None = None) -> PretrainedConfig:
    """Return the config that a class is built from: for a text class, the text part of the whole model's config."""
    of: Any = kind.config_class
    found = hf_config if isinstance(hf_config, of) else hf_config.get_text_config()
    if outputs is not None:
        found.num_labels = outputs
    return found


def find_named(network: PreTrainedModel, files: Path, base: Path | None = None) -> NamedClass:
    """Find the class that the base's config names, with the sizes of the config in `files`, around the run's network.

    `network`: the run's, without adapters. `base`: the directory of the base, if it can be read. Without it, the class
    is the one that transformers has for this kind of config. If that class does not contain the network, or cannot be
    built here (its tower may need a package of its own), the network's own class is used.
    """
    head = name_of_head(network)
    if head is not None:
        return _find_scoring(network, head, files, base)
    kind, unbuilt = _kind(read_config(base or files), base is not None), None
    if kind is not None and kind is not type(network):
        try:
            there = network_of(files, kind)
        except ModelError as error:
            unbuilt = f"a {kind.__name__}, the class that the base's config names, cannot be built here ({error})"
        else:
            places = _places(network, there)
            if places is not None:
                return NamedClass(network=there, files=files, places=places, outside=_outside(there))
    return NamedClass(network=network, files=files, places={"": ""}, outside=_outside(network), unbuilt=unbuilt)


def _find_scoring(network: PreTrainedModel, head: str, files: Path, base: Path | None) -> NamedClass:
    """Find the class that transformers loads from the base's config for scores, or else from the run's own."""
    own, there = network.config.model_type, str(read_config(base or files).get("model_type"))
    kind, unbuilt = kind_for(there), None
    if there != own and kind is not None:
        try:
            found = network_of(files, kind, network.get_submodule(head).out_features)
        except ModelError as error:
            unbuilt = f"a {kind.__name__}, the class that the base's config names, cannot be built here ({error})"
        else:
            places = _scoring_places(network, head, found)
            if places is not None:
                return NamedClass(network=found, files=files, places=places, outside=_outside(found))
    return replace(scoring_class_of(network, files), unbuilt=unbuilt)


def scoring_class_of(network: PreTrainedModel, files: Path) -> NamedClass:
    """Return transformers' class for what a run's network is with its head that scores; refuse a network without one.

    `files`: the directory whose config.json has its sizes.
    """
    head, kind = name_of_head(network), kind_of(network)
    if head is None or kind is None:
        raise no_class_for(network)
    outputs = network.get_submodule(head).out_features
    try:
        with torch.device("meta"), bounded_building():
            there = kind._from_config(config_for(kind, copy.deepcopy(network.config), outputs))
    except Exception as error:  # its checks may raise anything
        raise no_class_for(network, first_line(error)) from error
    places = _scoring_places(network, head, there)
    if places is None:
        raise no_class_for(network, f"a {kind.__name__} has other layers")
    return NamedClass(network=there, files=files, places=places, outside=_outside(there))


def _kind(values: Mapping[str, Any], of_base: bool) -> Kind | None:
    """Return the class that a config.json names.

    A run's own config.json names the class that it trains, so there the model_type decides.
    """
    if "auto_map" in values or function_in(values) is not None:
        return None
    kind = str(values.get("model_type"))
    known = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}.get(kind)
    architectures = values.get("architectures")
    names = architectures if of_base and isinstance(architectures, list) else []
    for name in (*names, known):
        found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            # A class of another type is the text class: older exports name it next to the whole model's config.
            of: Any = getattr(found, "config_class", None)
            return found if getattr(of, "model_type", None) == kind else None
    return None


def _places(own: PreTrainedModel, there: PreTrainedModel) -> dict[str, str] | None:
    """Find the network's decoder and head in the other network; None if not all of the network is in it."""
    found: dict[str, str] = {}
    heads = own.get_output_embeddings(), there.get_output_embeddings()
    for mine, others in ((own.get_decoder(), there.get_decoder()), heads):
        if mine is None or others is None or type(others) is not type(mine):
            return None
        found[name_in(own, mine)] = name_in(there, others)
    tensors = there.state_dict()
    return found if all(_moved(name, found) in tensors for name in own.state_dict()) else None


def _scoring_places(own: PreTrainedModel, head: str, there: PreTrainedModel) -> dict[str, str] | None:
    """Find a network that scores in a class that does; None if that lacks a part, or has more than parts that see."""
    decoders = own.get_decoder(), there.get_decoder()
    if type(getattr(there, SCORE, None)) is not nn.Linear or type(decoders[0]) is not type(decoders[1]):
        return None
    tensors, outside = there.state_dict().keys(), _outside(there)
    for rest in ({"": ""}, {name_in(own, decoders[0]): name_in(there, decoders[1])}):
        places = {**rest, head: SCORE}
        moved = {_moved(name, places) for name in own.state_dict()}
        more = (name for name in tensors - moved if all(_inner(name, part) is None for part in outside))
        if moved <= tensors and not any(True for _ in more):
            return places
    return None


def _outside(network: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the largest modules that are neither decoder nor head, nor contain or lie in them."""
    if network.config.get_text_config() is network.config:
        return ()
    parts = network.get_decoder(), network.get_output_embeddings() or getattr(network, SCORE, None)
    inside = [name_in(network, each) for each in parts if each is not None]
    found: list[str] = []
    for name, module in network.named_modules():
        around = any(_inner(each, name) is not None for each in inside)
        within = any(_inner(name, each) is not None for each in [*inside, *found])
        if name and not around and not within and any(True for _ in module.parameters()):
            found.append(name)
    return tuple(found)


def _inner(name: str, part: str) -> str | None:
    """Return the rest of a name below a module; None if it is not below it."""
    if name == part or not part:
        return name.removeprefix(part) if part else name
    return name.removeprefix(f"{part}.") if name.startswith(f"{part}.") else None


def _moved(name: str, places: Mapping[str, str]) -> str | None:
    """Replace the module at the front of a name with its new name, for the innermost of these modules."""
    for part in sorted(places, key=len, reverse=True):
        rest = _inner(name, part)
        if rest is not None:
            return ".".join(each for each in (places[part], rest) if each)
    return None
