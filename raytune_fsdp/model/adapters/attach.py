"""Attach adapters to a network's frozen weights (LoRA and its kin): PEFT's modules, and the values they begin with.

PEFT wraps every module that it adapts in a module of its own, on the meta device like the rest of the network. This
changes names: `q_proj.weight` becomes `q_proj.base_layer.weight`, next to `q_proj.lora_A.default.weight`.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from raytune_fsdp.base.errors import ConfigError, ModelError, first_line, pip_install
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config.sections.method import AdapterMethod, Ia3Method, LoraMethod
from raytune_fsdp.model.adapters.dora import make_traceable
from raytune_fsdp.model.adapters.targets import is_expression, read_past, routers_of_method, targets_of
from raytune_fsdp.model.added_rows import ROWS, weights_with_rows
from raytune_fsdp.model.score_head import head_of, name_of_head
from raytune_fsdp.model.weights.keys import owned_tensors
from raytune_fsdp.model.weights.source import Weights

if TYPE_CHECKING:
    from peft import PeftConfig

ADAPTER = "default"
"""PEFT's default name of an adapter. It is in the names of the tensors, not in files."""

# What PEFT's modules add to the name of a weight that is not theirs. The last marks a copy that is trained whole.
_AROUND = re.compile(rf"\.(base_layer|original_module|modules_to_save\.{ADAPTER})(?=\.|$)")

_OF_ADAPTER = re.compile(r"\.(?:lora_|ia3_l)")
"""What begins the part of a tensor's name that is its adapter's."""

# Where PEFT keeps the rows of tokens that are trained alone, by the name of their module.
_ROWS_IN_PEFT = "token_adapter.trainable_tokens_delta"

_READ_BYTES = 4 << 20


def attach(network: PreTrainedModel, method: AdapterMethod, adapted: Collection[str] | None = None) -> None:
    """Put adapters into a network on the meta device, and freeze everything else.

    `adapted`: the modules that have adapters in a run that goes on (`adapted_modules`); None: it begins now.
    """
    dtype = network.dtype
    _check_tied(network, method.modules_to_save)
    routers = routers_of_method(network, method)
    if adapted is None:  # what a run has begun with, it goes on with
        _check_routers(network, method, routers)
    peft_config, head = _peft_config(network, method, routers, adapted), name_of_head(network)
    try:
        from peft import inject_adapter_in_model

        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # what warnings say is checked here, or is an error below
            inject_adapter_in_model(peft_config, network, ADAPTER, low_cpu_mem_usage=True)
    except ConfigError:
        raise
    except Exception as error:  # nothing matched, or PEFT cannot adapt what did, which can fail in many ways
        raise _unfit(network, method, error) from error
    if head is not None and name_of_head(network) is None:
        field = "target_modules" if is_adapter_layer(network.get_submodule(head)) else "modules_to_save"
        raise ConfigError(
            f"method.{field} means {head}, too, the head that scores, which is trained whole in any "
            "case (model.head): leave it out there"
        )
    _check_each(network, method, routers)
    make_traceable(network)
    if (scores := head_of(network)) is not None:
        scores.requires_grad_(True)
    for parameter in adapter_tensors(network).values():
        parameter.data = parameter.data.to(dtype)


def _peft_config(
    network: PreTrainedModel, method: AdapterMethod, routers: list[str], adapted: Collection[str] | None
) -> PeftConfig:
    try:
        from peft import IA3Config, LoraConfig
    except ImportError as error:
        raise ConfigError(f"method.type={method.type} needs PEFT: {pip_install('lora')}") from error
    if isinstance(method, Ia3Method):
        return IA3Config(
            target_modules=method.target_modules,
            feedforward_modules=method.feedforward_modules,
            modules_to_save=method.modules_to_save or None,
            task_type="CAUSAL_LM",
        )
    return LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        use_rslora=method.rank_stabilized,
        use_dora=method.dora,
        target_modules=targets_of(network, method, routers, adapted) or None,
        target_parameters=method.target_parameters or None,
        modules_to_save=[*method.modules_to_save, *(routers if method.routers == "trained" else [])] or None,
        task_type="CAUSAL_LM",
    )


def _check_tied(network: PreTrainedModel, saved: list[str]) -> None:
    """Refuse to train one of two modules that share a weight."""
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    if outputs is None or outputs.weight is not inputs.weight:
        return
    both = [name for name, module in network.named_modules() if module in (inputs, outputs)]
    for each in saved:
        if any(f".{name}".endswith(f".{each}") for name in both):
            raise ConfigError(
                f"method.modules_to_save: {each!r} of a {type(network).__name__} shares its weight "
                f"({' and '.join(both)} are one), and PEFT would train a copy apart: leave it out, or train it with "
                "method.type=freeze"
            )


def _unfit(network: PreTrainedModel, method: AdapterMethod, error: Exception) -> ConfigError:
    targets = method.target_modules
    asked = targets if isinstance(targets, list) else [targets] if targets is not None else []
    if isinstance(method, Ia3Method) and targets is None:
        return ConfigError(
            f"method.target_modules=null: PEFT does not know which modules of a {type(network).__name__} IA3 scales: "
            "name them, and those of them that are feedforward layers also in method.feedforward_modules; "
            f"{_nearest(network, asked)}"
        )
    kind, said = type(network).__name__, first_line(error)
    if "not found in the base model" in said:  # and then all names as a set, in an order that changes
        why = f"a {kind} has no such modules"
    elif forbidden := re.search(r"Module '([^']+)' is incompatible", said):
        why = f"PEFT adapts no {shown(forbidden[1])} of a {kind}, as kernels read its weight past an adapter"
    else:
        why = f"PEFT cannot adapt a {kind} so ({shorten(said, 200)})"
    return ConfigError(f"method.target_modules={shown(targets)}: {why}; {_nearest(network, asked)}")


def _check_each(network: PreTrainedModel, method: AdapterMethod, routers: list[str]) -> None:
    """Refuse a name that matches nothing: PEFT is content if one of several does."""
    kind = type(network).__name__
    weights = method.target_parameters if isinstance(method, LoraMethod) else []
    asked = {name.rpartition(".")[2] for name in weights}
    wrapped = {module.parameter_name for module in network.modules() if type(module).__name__ == "ParamWrapper"}
    if wrapped - asked:
        raise ConfigError(
            f"method.target_modules={shown(method.target_modules)}: PEFT takes some of these names for the experts of "
            f"a {kind}, which are weights and no modules: leave those names out, and name the weights in "
            f"method.target_parameters ({', '.join(sorted(wrapped - asked))})"
        )
    if asked - wrapped:
        raise ConfigError(
            f"method.target_parameters={shown(weights)}: a {kind} has no such weights; "
            f"{_nearest(network, weights, weights=True)}"
        )
    _check_shared(network, method)
    for name in routers:
        if any(is_adapter_layer(module) for module in network.get_submodule(name).modules()):
            raise _other_routers(method, "target_modules", name)
    adapted = [base_name(name) for name in adapter_tensors(network)]
    targets = method.target_modules
    # The modules of target_parameters have adapters, too, but are not meant here.
    own = {
        base_name(name)
        for name, module in network.named_modules()
        if is_adapter_layer(module) and type(module).__name__ != "ParamWrapper"
    }
    if is_expression(targets) and not any(re.fullmatch(str(targets), name) for name in own):
        raise ConfigError(
            f"method.target_modules={shown(targets)}: the expression matches the whole name of no module of a {kind} "
            f"that can have an adapter: correct it, or name modules in a list; {_nearest(network, [str(targets)])}"
        )
    listed = targets if isinstance(targets, list) else []
    for field, names in (("target_modules", listed), ("modules_to_save", method.modules_to_save)):
        for each in names:
            if not any(f".{each}." in f".{name}." for name in adapted):
                raise ConfigError(
                    f"method.{field}: {shown(each)} is the name of no module of a {kind}; {_nearest(network, [each])}"
                )


def _check_routers(network: PreTrainedModel, method: AdapterMethod, routers: list[str]) -> None:
    """Refuse fields that mean routers, or parts of them, of which `method.routers` says otherwise."""
    asked = getattr(method, "routers", None)
    for router in routers:
        module, parts = network.get_submodule(router), router.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts))]
        inside = [f"{router}.{name}" for name, _ in module.named_modules() if name]
        trained = {
            "modules_to_save": [*around, *inside, *([router] if asked == "frozen" else [])],
            "target_parameters": [f"{router}.{name}" for name, _ in module.named_parameters()],
        }
        for field, names in trained.items():
            if any(name.endswith(tuple(getattr(method, field))) for name in names):  # as PEFT finds them
                raise _other_routers(method, field, router)


def _other_routers(method: AdapterMethod, field: str, router: str) -> ConfigError:
    return ConfigError(
        f"method.{field}={shown(getattr(method, field))} means {router}, too, which chooses experts, and "
        f"method.routers={getattr(method, 'routers', None)} says otherwise: leave method.routers out, or that name out "
        f"of method.{field}"
    )


def _check_shared(network: PreTrainedModel, method: AdapterMethod) -> None:
    """Refuse an adapter of a weight that two modules share: trained on one of them, it would be merged into both."""
    uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    for name, module in network.named_modules():
        if not is_adapter_layer(module):
            continue
        base = module.get_base_layer()
        if any(uses[id(p)] > 1 for p in base.parameters(recurse=False)):
            raise ConfigError(
                f"method.target_modules: {base_name(name)} of a {type(network).__name__} shares its weight with "
                "another module, and an adapter would be trained on one of them only: leave it out"
            )
        if isinstance(base, nn.Embedding) and getattr(method, "dora", False):
            raise ConfigError(
                f"method.dora=true: {base_name(name)} is an embedding; leave it out, or set method.dora=false"
            )
        if isinstance(base, nn.Embedding) and getattr(method, "init", "zero") != "zero":
            raise ConfigError(
                f"method.init={getattr(method, 'init', None)}: {base_name(name)} is an embedding; leave it out, or set "
                "method.init=zero"
            )


def _nearest(network: PreTrainedModel, asked: list[str], *, weights: bool = False) -> str:
    """Return a way out: the names of modules, or of weights, or those that are most like these, as they come."""
    parts, past = 2 if weights else 1, read_past(network)
    if weights:
        own = (base_name(name) for name, _ in network.named_parameters() if ".lora_" not in name)
    else:
        linear = (nn.Linear, Conv1D)
        names = (base_name(name) for name, module in network.named_modules() if isinstance(module, linear))
        own = (name for name in names if ".lora_" not in name and name not in past)
    known = list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in own))[:1000]
    # Only ten names, and 100 characters of each: a search costs the product of both lists' lengths, and finds repeat.
    wanted = (".".join(name.split(".")[-parts:])[:100] for name in asked)
    unknown = [name for name in dict.fromkeys(wanted) if name not in known][:10]
    near = dict.fromkeys(match for each in unknown for match in difflib.get_close_matches(each, known, n=3, cutoff=0.4))
    named = [*near, *(each for each in known if each not in near)][:12]
    listed = ", ".join(sorted(named, key=known.index))
    return f"its {'weights' if weights else 'linear layers'} are called {listed}"


# --- Names ------------------------------------------------------------------------------------------------------------


def is_adapted(network: nn.Module) -> bool:
    """Return whether a network has adapters: its checkpoints then hold only these."""
    return hasattr(network, "peft_config")


def keep_initial_adapters(network: nn.Module, names: Iterable[str]) -> None:
    """Keep a copy of these adapters as they are now, before the first step."""
    network.initial_adapters = {name: network.get_parameter(name).detach().clone() for name in names}  # type: ignore[assignment]


def initial_adapters(network: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the copies that `keep_initial_adapters` has made."""
    found: Mapping[str, torch.Tensor] = getattr(network, "initial_adapters", {})
    return found


def unadapted(network: PreTrainedModel) -> tuple[list[str], float]:
    """Return the names of the layers' weights without an adapter, the largest first, and their share of all layers."""
    adapted = {
        id(getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight")))  # type: ignore[operator]
        for module in network.modules()
        if is_adapter_layer(module)
    }
    tables = {id(each.weight) for each in (network.get_input_embeddings(), network.get_output_embeddings()) if each}
    found: Counter[str] = Counter()
    whole = 0
    for name, parameter in network.named_parameters():
        # PEFT keeps the first values of a module that is trained whole.
        left_out = parameter.ndim < 2 or id(parameter) in tables or ".original_module." in name
        if left_out or parameter.requires_grad:
            continue
        whole += parameter.numel()
        if id(parameter) not in adapted:
            found[_without_numbers(name)] += parameter.numel()
    return [name for name, _ in found.most_common()], found.total() / max(1, whole)


def frozen_experts(network: PreTrainedModel) -> Counter[str]:
    """Count the numbers of the experts' frozen weights, by name without the numbers of their layers."""
    found: Counter[str] = Counter()
    for name, parameter in network.named_parameters():
        # A convolution of a state-space layer also has three dimensions, but one of them is 1.
        if parameter.ndim == 3 and min(parameter.shape) > 1 and not parameter.requires_grad:
            found[_without_numbers(name)] += parameter.numel()
    return found


def _without_numbers(name: str) -> str:
    return re.sub(r"^.*\.\d+\.", "", base_name(name))


def why_not_compiled(network: nn.Module) -> str | None:
    """Return why the layers of a network with adapters are not to be compiled, or None."""
    wrapped = any(type(module).__name__ == "ParamWrapper" for module in network.modules())
    return "PEFT puts adapters of method.target_parameters in place again in every pass" if wrapped else None


def base_name(name: str) -> str:
    """Return the name that a weight has in the network without adapters."""
    return _AROUND.sub("", name)


def adapter_tensors(network: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the trained tensors by name; a tied one only under its first name."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def adapted_modules(tensors: Iterable[str]) -> list[str]:
    """Return the modules that adapters are attached to, from the names of a network's or a checkpoint's tensors."""
    return sorted({base_name(_OF_ADAPTER.split(name)[0]) for name in tensors if _OF_ADAPTER.search(name)})


def added_rows_of(network: PreTrainedModel) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return, by the name of rows trained alone, the frozen weight next to them and their ids. Tied rows come once."""
    trained = adapter_tensors(network)
    return {name: (weight, ids) for name, weight, ids in weights_with_rows(network) if name in trained}


def stored_names(network: PreTrainedModel) -> dict[str, str]:
    """Return the key that each trained tensor has in PEFT's `adapter_model.safetensors`."""
    from peft import get_peft_model_state_dict

    tensors = adapter_tensors(network)
    names = {id(parameter): name for name, parameter in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The parameters themselves are the values, so that the result shows which key each of them got.
        found = get_peft_model_state_dict(
            network, state_dict=dict(network.state_dict(keep_vars=True)), save_embedding_layers=False
        )
    keys = {names[id(value)]: f"base_model.model.{key}" for key, value in reversed(found.items()) if id(value) in names}
    keys |= {name: f"base_model.model.{name.removesuffix(ROWS)}{_ROWS_IN_PEFT}" for name in added_rows_of(network)}
    if (head := name_of_head(network)) is not None:  # to PEFT, a module of modules_to_save
        keys[f"{head}.weight"] = f"base_model.model.{head}.weight"
    assert keys.keys() == tensors.keys(), sorted(keys.keys() ^ tensors.keys())
    return {name: keys[name] for name in tensors}


# --- Values -----------------------------------------------------------------------------------------------------------


class AdaptedWeights:
    """The weights of a network with adapters: its own from `base`, adapters as they begin.

    An adapter's first values are drawn under a key of its name, or taken from `adapter`. A new adapter changes nothing:
    one of LoRA's two matrices is zero, IA3's factors are one, and rows of new tokens are those of the base.
    """

    def __init__(self, base: Weights, network: PreTrainedModel, seed: int, adapter: Weights | None = None) -> None:
        self._base = base
        self._stored = base.shapes()  # kept: it is needed for every few MiB that are read
        self._seed = seed
        self._adapter = adapter
        self._given = {} if adapter is None else adapter.shapes()
        self._tensors = owned_tensors(network)
        self._rows = added_rows_of(network)
        # Adapted modules whose weights are stored input first (GPT-2's Conv1D).
        self._turned = {name for name, each in network.named_modules() if getattr(each, "fan_in_fan_out", False)}
        self._drawn: tuple[str, torch.Tensor] | None = None

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        stored = self._stored
        return {name: stored.get(base_name(name), tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if self._adapter is not None and name in self._given:
            return self._adapter.read(name, start, stop)
        stored = base_name(name)
        if stored in self._stored:
            return self._base.read(stored, start, stop)
        if name in self._rows:
            weight, ids = self._rows[name]
            return torch.cat(
                [self._base.read(weight, 0, 0), *(self._base.read(weight, i, i + 1) for i in ids[start:stop])]
            )
        if ".lora_magnitude_vector." in name:
            return self._lengths(name, start, stop)
        if self._drawn is None or self._drawn[0] != name:
            self._drawn = name, self._draw(name)
        return self._drawn[1][start:stop]

    def where(self, name: str) -> str:
        if self._adapter is not None and name in self._given:
            return self._adapter.where(name)
        stored = self._rows[name][0] if name in self._rows else base_name(name)
        return self._base.where(stored) if stored in self._stored else f"{name}, drawn at random,"

    def _draw(self, name: str) -> torch.Tensor:
        """Draw an adapter as PEFT does: the first matrix for a linear layer, the second for an embedding."""
        tensor = torch.zeros(self._tensors[name].shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key("adapter", self._seed, name))
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))
            elif ".lora_embedding_B." in name:
                nn.init.normal_(tensor)
            elif ".ia3_l." in name:
                tensor.fill_(1.0)
        return tensor

    def _lengths(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return DoRA's magnitudes: the lengths of the adapted weight's rows, which are columns in a Conv1D."""
        prefix = name.partition(".lora_magnitude_vector.")[0]
        weight = f"{base_name(prefix)}.weight"
        rows, *rest = self._stored[weight]
        first, last = (0, rows) if prefix in self._turned else (start, stop)
        at_once = max(1, _READ_BYTES // (4 * math.prod(rest)))
        parts = (self._base.read(weight, i, min(last, i + at_once)).float() for i in range(first, last, at_once))
        if prefix not in self._turned:
            return torch.cat([torch.linalg.norm(part, dim=1) for part in parts]) if first < last else torch.empty(0)
        squares = sum(part.double().square().sum(0) for part in parts)
        assert isinstance(squares, torch.Tensor)
        return squares.sqrt().float()[start:stop]


def check_adapter_shapes(
    network: PreTrainedModel, adapter: Weights, where: str, names: Collection[str] | None = None
) -> None:
    """Refuse an adapter of another rank or of other modules. `names`: the tensors that it should have, if not all."""
    tensors = adapter_tensors(network)
    wanted = {name: tuple(tensors[name].shape) for name in (tensors if names is None else names)}
    found = {name: tuple(shape) for name, shape in adapter.shapes().items()}
    differ = sorted({name for name, _ in wanted.items() ^ found.items()})
    if differ:
        name = differ[0]
        raise ModelError(
            f"method.adapter={where} is not of this method: {name} is {found.get(name, 'missing')} there and "
            f"{wanted.get(name, 'missing')} here; set method.rank and target_modules as in its adapter_config.json"
        )


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether PEFT wrapped another module in this one to adapt it. One that is trained whole does not count."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


@contextmanager
def without_adapters_in(network: PreTrainedModel, *, off: bool = True) -> Iterator[None]:
    """Have a network compute as its base alone does, while the context lasts and if `off`."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    # The flags alone: PEFT's own switch also says of each weight that it gets no gradient, which FSDP has decided by
    # when the network was sharded.
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers = [module for module in network.modules() if isinstance(module, kinds)] if off else []
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
