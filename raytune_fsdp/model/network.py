"""Build a network on the meta device from a Hugging Face config: every shape, no memory. `fill.py` fills it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from raytune_fsdp.base.errors import ConfigError, ModelError, first_line
from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config import FinetuneConfig, ModelConfig
from raytune_fsdp.config.sections.method import AdapterMethod, FreezeMethod, FullMethod, LoraMethod, Method
from raytune_fsdp.config.sections.model import HeadConfig
from raytune_fsdp.data.rows.own_code import OwnCode
from raytune_fsdp.model.adapters.attach import attach
from raytune_fsdp.model.adapters.config_file import adapter_instead
from raytune_fsdp.model.added_rows import train_rows
from raytune_fsdp.model.directory.bounds import (
    NEEDS_CODE,
    bounded_building,
    check_buffers,
    read_config,
    unknown_word,
    wants_code,
)
from raytune_fsdp.model.directory.named_class import built_on_meta
from raytune_fsdp.model.directory.needed_code import function_in
from raytune_fsdp.model.directory.quantization import make_plain, quantization_of
from raytune_fsdp.model.directory.scoring import check_head, scoring_class
from raytune_fsdp.model.objective.routers import names_of_routers
from raytune_fsdp.model.own_network import KEY, build_own, own_config
from raytune_fsdp.model.score_head import head_of, put_score_head
from raytune_fsdp.model.weights.keys import all_names

MASTER_DTYPE = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
    "bf16_pure": torch.bfloat16,
    "fp8": torch.float32,
}
"""Type of the weights that the optimizer updates, by `parallel.precision`."""


def load_architecture(config: ModelConfig, directory: Path | None) -> PretrainedConfig:
    """Return the Hugging Face config, from the model's directory or inline, with overrides."""
    if config.network is not None:
        OwnCode(KEY, config.network).load()  # its module may tell transformers of its config
    hf_config = _read(config, directory)
    if config.network is not None:
        hf_config = own_config(config.network, hf_config)
    # A model that also sees or hears keeps its language model's sizes in a separate config.
    text = hf_config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ModelError(f"model: {hf_config.model_type!r} is not a language model: its config has no vocab_size")
    if config.init == "pretrained" and directory is not None:
        quantization_of(read_config(directory), f"model.path={config.path}")  # refuses what cannot be read
        check_head(hf_config, config.head, str(config.path))
    make_plain(hf_config)
    for key, value in config.overrides.items():
        if not _has(text, key):
            raise ModelError(
                f"model.overrides.{key}={value!r}: the architecture {hf_config.model_type!r} has no such attribute; "
                "see its config.json for the ones it has"
            )
        _checked(partial(setattr, text, key, value), f"model.overrides.{key}={value!r}")
    return hf_config


def _has(text: PretrainedConfig, key: str) -> bool:
    try:
        return hasattr(text, key)
    except Exception as error:
        # Gemma 4's head_dim is one number for some layers and another for the rest: transformers refuses to read it,
        # and setting it here would set it for all.
        raise ModelError(
            f"model.overrides.{key}: it is not the same in all layers of a {text.model_type!r}, so it cannot be set "
            f"for all of them; leave it out, or change it in a config.json ({first_line(error)})"
        ) from error


def fit_vocabulary(hf_config: PretrainedConfig, vocabulary: int, *, resize: bool) -> None:
    """Grow the config's vocabulary to a tokenizer's ids, which end at `vocabulary - 1`, if the user allows it."""
    text = hf_config.get_text_config()
    # Fewer ids than rows is usual: vocabularies are padded to sizes that matrix products like. Nothing is ever cut.
    if vocabulary <= text.vocab_size:
        return
    if not resize:
        raise ModelError(
            f"the tokenizer has ids up to {vocabulary - 1}, but the model's vocabulary has only {text.vocab_size} "
            "tokens: set model.resize_embeddings=true to grow its embeddings, or use the model's own tokenizer"
        )
    # Gemma 4 looks tokens up in a second table, of the same length.
    if getattr(text, "vocab_size_per_layer_input", None) == text.vocab_size:
        text.vocab_size_per_layer_input = vocabulary
    text.vocab_size = vocabulary


def _read(config: ModelConfig, directory: Path | None) -> PretrainedConfig:
    if config.architecture is not None:
        values = dict(config.architecture)
        model_type = values.pop("model_type")
        if model_type not in CONFIG_MAPPING:
            raise ModelError(
                f"model.architecture.model_type={model_type!r} is not known to the installed transformers: "
                "check the spelling, or install a newer transformers"
            )
        return _checked(lambda: CONFIG_MAPPING[model_type](**values), f"model.architecture ({model_type})")
    assert directory is not None, "a model without an inline architecture has a directory"
    if not (directory / "config.json").is_file():
        raise adapter_instead(str(config.path), directory) or ModelError(
            f"model.path={config.path}: {directory} has no config.json; it must be a Hugging Face model directory"
        )
    values = _checked(partial(read_config, directory), f"model.path={config.path}")
    if config.network is None and (function := function_in(values)) is not None:
        raise ModelError(
            f"model.path={config.path} needs a network of its maker's own, which {shown(function)} builds: look at "
            f"that code, then set model.network={shown(function)}"
        )
    return _checked(
        lambda: AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code),
        f"model.path={config.path}",
    )


def _checked(read: Callable[[], Any], what: str) -> Any:
    """Call `read`, and turn what transformers raises about a config into one line that says where it came from."""
    try:
        return read()
    except Exception as error:  # its checks, and code that comes with a model, may raise anything
        if wants_code(error):
            raise ModelError(f"{what} {NEEDS_CODE}, then set model.trust_remote_code=true") from error
        # The first line of a StrictDataclassError only names the field; the reason is in its cause.
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise ModelError(f"{what} is not a config that transformers accepts: {first_line(cause)}") from error


def class_name(model: nn.Module) -> str:
    """Return the name of a network's class. `fully_shard` puts a class of its own, FSDP<name>, before it."""
    kind = type(model)
    return (kind.__bases__[-1] if isinstance(model, FSDPModule) else kind).__name__


def build_network(
    hf_config: PretrainedConfig,
    config: FinetuneConfig,
    added: Collection[int] = (),
    adapted: Collection[str] | None = None,
) -> PreTrainedModel:
    """Build the network that a run trains, on the meta device. All who need one call this, so all have the same.

    All weights have the type of master weights; `precision.store_frozen` gives frozen weights their own later.
    `added`: the ids of new tokens, whose rows may be trained alone. `adapted`: the modules that have adapters in a run
    that goes on.
    """
    network = build_base(hf_config, config.model, config.parallel.precision)
    choose_trained(network, config.method, added, adapted)
    return network


def build_base(hf_config: PretrainedConfig, config: ModelConfig, precision: str) -> PreTrainedModel:
    """Build the architecture's network on the meta device, in the type of master weights, with tied weights tied.

    A head that scores is put on it here, for all who build a network of the run.
    """
    if config.head is not None:
        hf_config = copy.deepcopy(hf_config)  # that of such a network says that nothing is tied
    kwargs: dict[str, Any] = {"dtype": MASTER_DTYPE[precision], "trust_remote_code": config.trust_remote_code}
    if not config.chooses_attention:
        kwargs["attn_implementation"] = config.attention
    if _sees_ahead(hf_config):  # before it is built: transformers would warn that it is none
        raise ModelError(
            f"model: {hf_config.model_type!r} is an encoder, whose tokens see the ones they are to predict: choose a "
            "decoder, such as Llama, Qwen or Gemma"
        )
    try:
        with torch.device("meta"), bounded_building():
            if config.network is None:
                model = _causal_lm(hf_config, kwargs)
            else:
                model = build_own(config.network, hf_config, kwargs["dtype"], kwargs.get("attn_implementation"))
    except ModelError:
        raise
    except Exception as error:  # as in `_checked`
        if "attn_implementation" in kwargs and "attention implementation" in str(error):
            raise ModelError(
                f"model.attention={config.attention}: transformers has none of this kind for {hf_config.model_type!r}: "
                "leave it out, and one that fits is chosen"
            ) from error
        raise ModelError(
            f"model: transformers cannot build a causal LM of type {hf_config.model_type!r}: "
            f"{unknown_word(hf_config, error) or first_line(error)}"
        ) from error
    if MASTER_DTYPE[precision] == torch.bfloat16:
        _keep_in_fp32(model)
    for parameter in model.parameters():
        parameter.is_fixed = not parameter.requires_grad  # type: ignore[attr-defined]
    choose_experts(model)
    if config.head is not None:
        put_score_head(model, config.head)
    model.train()
    return model


def _causal_lm(hf_config: PretrainedConfig, kwargs: Mapping[str, Any]) -> PreTrainedModel:
    asked = kwargs.get("attn_implementation", "")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, **kwargs)
    except ImportError as error:
        # transformers refuses flash attention on a machine without a GPU or flash-attn, and a run may be prepared or
        # measured on one: `set_attention` asks again on the ranks.
        if not asked.startswith("flash_attention_") or "FlashAttention" not in str(error):
            raise
        hf_config._attn_implementation = None
        kwargs = {key: value for key, value in kwargs.items() if key != "attn_implementation"}
        model = AutoModelForCausalLM.from_config(hf_config, **kwargs)
    except ValueError as error:
        if asked.startswith("flash_attention_") and "Flash Attention" in str(error):
            kind = hf_config.model_type
            raise ModelError(f"model.attention={asked}: {kind} has none in transformers; set it to auto") from error
        raise
    return model


def choose_experts(model: PreTrainedModel) -> None:
    """Have the experts of an fp64 network computed one after the other: torch has grouped products only up to fp32."""
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def stored_network(directory: Path) -> PreTrainedModel | None:
    """Build the network of a directory's config.json on the meta device; None if it needs code of its own.

    It is the network of a run: one that scores is a causal LM with another head.
    """

    def make(hf_config: PretrainedConfig) -> PreTrainedModel:
        kept = copy.deepcopy(hf_config)  # a head changes the one of its network
        return with_stored_head(AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False), kept)

    return built_on_meta(directory, make)


def with_stored_head(model: PreTrainedModel, hf_config: PretrainedConfig) -> PreTrainedModel:
    """Give the network of a config the head that the config names, on the meta device, if that scores."""
    if scoring_class({"architectures": hf_config.architectures}) is not None:
        put_score_head(model, HeadConfig(type="score", outputs=hf_config.num_labels))
    return model


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the names of the tensors that are in fp32 when the rest of the network has this type."""
    # Some are always made in fp32 (Zamba's A_log), which only a network built in this type shows.
    with torch.device("meta"):
        twin = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    made = {name for name, tensor in twin.state_dict().items() if tensor.dtype == torch.float32 != dtype}
    return made | _listed_for_fp32(model, dtype)


def _listed_for_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    # transformers has two lists: one for both 16-bit types, one for fp16 only, whose numbers end at 65,504.
    patterns = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    patterns |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    # Matched anywhere in the name, as transformers does; `(?!)` matches nothing.
    found = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)) or r"(?!)")
    return {name for name, tensor in model.state_dict().items() if tensor.is_floating_point() and found.search(name)}


def _keep_in_fp32(model: PreTrainedModel) -> None:
    """Keep listed buffers in fp32. Refuse weights: FSDP gathers a layer in one buffer, so its weights need one type."""
    kept = _listed_for_fp32(model, torch.bfloat16)
    weights = sorted(kept & {name for name, _ in model.named_parameters()})
    if weights:
        raise fp32_in_bf16(model, weights)
    for name in kept:
        owner, _, buffer = name.rpartition(".")
        model.get_submodule(owner)._buffers[buffer] = model.get_buffer(name).float()


def fixed_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Return the weights that no method trains, as its makers have it, and that stay in fp32 when a network of
    `build_base` computes in this type: the biases of ERNIE's routers."""
    fixed = {name for name, parameter in model.named_parameters() if getattr(parameter, "is_fixed", False)}
    return sorted(fixed and fixed & kept_in_fp32(model, dtype))  # what is kept takes a second network to know


def as_buffers(model: nn.Module, names: Sequence[str]) -> None:
    """Turn weights into stored buffers of the same names, which keep their type: FSDP gathers weights in one type."""
    for name in names:
        owner, _, last = name.rpartition(".")
        module, weight = model.get_submodule(owner), model.get_parameter(name).detach()
        del module._parameters[last]
        module.register_buffer(last, weight)


def fp32_in_bf16(model: PreTrainedModel, weights: Sequence[str]) -> ModelError:
    return ModelError(
        f"parallel.precision=bf16_pure: {type(model).__name__} keeps {weights[0]} in fp32"
        + (f" (and {len(weights) - 1} more)" if len(weights) > 1 else "")
        + "; use parallel.precision=bf16, whose master weights are fp32"
    )


def _sees_ahead(hf_config: PretrainedConfig) -> bool:
    """Return whether this is an encoder such as BERT: transformers builds it as a causal LM, but not causal."""
    encoder = hf_config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return encoder and not hf_config.is_encoder_decoder and getattr(hf_config, "is_decoder", True) is False


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count a network's numbers, and those of them that are trained. Call it before sharding, on whole tensors."""
    parameters = list(model.parameters())
    return ParameterCount(
        total=sum(p.numel() for p in parameters), trainable=sum(p.numel() for p in parameters if p.requires_grad)
    )


@torch.no_grad()
def init_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, embedding scales); until now they are on meta.

    transformers computes them in `_init_weights`, module by module. There it also draws weights, unless they are marked
    as initialised.
    """
    check_buffers(model)
    for tensor in [*model.parameters(), *model.state_dict(keep_vars=True).values()]:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    persistent = set(model.state_dict())
    for prefix, module, owner in _with_owner(model, "", model):
        names = [n for n, _ in module.named_buffers(recurse=False) if _join(prefix, n) not in persistent]
        for name in names:
            # A NaN that is left shows that nothing computes the buffer. Integers have no such value.
            empty = torch.empty_like(module.get_buffer(name), device="cpu")
            module._buffers[name] = empty.fill_(torch.nan) if empty.is_floating_point() else empty.zero_()
        if names:
            _checked(partial(owner._init_weights, module), f"model: what {_join(prefix, names[0])} is computed from")
        for name in names:
            buffer = module.get_buffer(name)
            if _unset(buffer):
                _compute_from_outside(model, prefix, buffer, owner)
            if _unset(buffer):
                raise ModelError(
                    f"model: {class_name(owner)} does not compute its buffer {_join(prefix, name)} in "
                    "_init_weights, where a network that is built on the meta device gets it: compute it there, or use "
                    "another model"
                )
            module._buffers[name] = buffer.to(device)
        # Rotary modules keep a second reference to inv_freq, which would stay on the meta device.
        if "inv_freq" in names and "original_inv_freq" not in module._buffers and hasattr(module, "original_inv_freq"):
            module.original_inv_freq = module.get_buffer("inv_freq")


def _unset(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and bool(buffer.isnan().any())


def _compute_from_outside(model: PreTrainedModel, prefix: str, buffer: torch.Tensor, owner: PreTrainedModel) -> None:
    """Have the modules around a module compute its buffer: Falcon-H1's decoder computes the buffers of all layers."""
    if not type(owner).__module__.startswith("transformers."):
        return  # other code may draw weights there, whether they are marked as initialised or not
    while prefix and _unset(buffer):
        prefix = prefix.rpartition(".")[0]
        owner._init_weights(model.get_submodule(prefix))


def _with_owner(
    module: nn.Module, prefix: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield every module, children first, with its name and the innermost model around it, which initialises it."""
    if isinstance(module, PreTrainedModel):
        owner = module
    for name, child in module.named_children():
        yield from _with_owner(child, _join(prefix, name), owner)
    yield prefix, module, owner


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# Which weights of a network are trained, by `method`.


def choose_trained(
    network: PreTrainedModel, method: Method, added: Collection[int] = (), adapted: Collection[str] | None = None
) -> None:
    """Freeze what the method does not train, and add the weights that it brings. The network is on the meta device.

    `added` and `adapted` as in `build_network`.
    """
    if isinstance(method, FreezeMethod):
        freeze(network, method.trained)
    elif isinstance(method, FullMethod) and method.routers == "frozen":
        for name in names_of_routers(network):
            network.get_submodule(name).requires_grad_(False)
    elif isinstance(method, AdapterMethod):
        attach(network, method, adapted)
        if added and isinstance(method, LoraMethod) and method.train_added_tokens:
            train_rows(network, added)
    if (head := head_of(network)) is not None:
        head.requires_grad_(True)


def freeze(network: PreTrainedModel, trained: Sequence[str]) -> None:
    """Train only weights whose name contains a match of one of these expressions. A tied weight counts by any name."""
    names = all_names(network)
    every = [name for found in names.values() for name in found]
    for expression in trained:
        if not any(re.search(expression, name) for name in every):
            # One name of each kind: a network has hundreds that differ in a number.
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in every)
            raise ConfigError(
                f"method.trained: {expression!r} is found in the name of no weight of a {type(network).__name__}; they "
                f"are called {', '.join(list(kinds)[:12])}"
            )
    for first, parameter in network.named_parameters():
        parameter.requires_grad_(any(re.search(each, name) for each in trained for name in names[first]))
