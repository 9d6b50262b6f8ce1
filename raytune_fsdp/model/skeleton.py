"""From a config to a network on the meta device: every shape, no memory. Filling it is `fill.py`'s work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from raytune_fsdp.config import FinetuneConfig, ModelConfig
from raytune_fsdp.errors import ModelError, first_line
from raytune_fsdp.estimate.flops import Architecture

MASTER_DTYPE = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
    "bf16_pure": torch.bfloat16,
}
"""Type of the weights that the optimizer updates, by `parallel.precision`."""


def load_architecture(config: ModelConfig, directory: Path | None) -> PretrainedConfig:
    """The Hugging Face config: from the model's directory or inline, with overrides."""
    hf_config = _read(config, directory)
    text = hf_config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ModelError(f"model: {hf_config.model_type!r} is not a language model: its config has no vocab_size")
    quantized = getattr(hf_config, "quantization_config", None)
    if quantized is not None and config.init == "pretrained":
        method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
        raise ModelError(
            f"model.path={config.path}: its weights are quantized ({method}), which cannot be trained as they are: use "
            "the model in bf16, or make it so once with transformers (from_pretrained dequantizes many of them; "
            "save_pretrained)"
        )
    for key, value in config.overrides.items():
        if not hasattr(text, key):
            raise ModelError(
                f"model.overrides.{key}={value!r}: the architecture {hf_config.model_type!r} has no such attribute; "
                "see its config.json for those it has"
            )
        _checked(partial(setattr, text, key, value), f"model.overrides.{key}={value!r}")
    return hf_config


def fit_vocabulary(hf_config: PretrainedConfig, vocabulary: int, *, resize: bool) -> None:
    """Make room for a tokenizer's ids, the largest of which is `vocabulary - 1`, where the user wants that."""
    text = hf_config.get_text_config()
    if vocabulary <= text.vocab_size:
        return
    if not resize:
        raise ModelError(
            f"the tokenizer has ids up to {vocabulary - 1}, but the model's vocabulary has only {text.vocab_size} "
            "tokens: set model.resize_embeddings=true to grow its embeddings, or use the model's own tokenizer"
        )
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
        raise ModelError(
            f"model.path={config.path}: {directory} has no config.json; it must be a Hugging Face model directory"
        )
    return _checked(
        lambda: AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code),
        f"model.path={config.path}",
    )


def _checked(read: Callable[[], Any], what: str) -> Any:
    """transformers' own complaint about a config, as one line that says where it comes from."""
    try:
        return read()
    except Exception as error:  # its checks, and code that comes with a model, may raise anything
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise ModelError(f"{what} is not a config that transformers accepts: {first_line(cause)}") from error


def build_network(hf_config: PretrainedConfig, config: FinetuneConfig) -> PreTrainedModel:
    """The network that a run trains, on the meta device. Whoever needs one builds it here, so all have the same."""
    return build_skeleton(hf_config, config.model, config.parallel.precision)


def build_skeleton(hf_config: PretrainedConfig, config: ModelConfig, precision: str) -> PreTrainedModel:
    """The network of the architecture on the meta device, in the type of its master weights, tied weights tied."""
    kwargs: dict[str, Any] = {"dtype": MASTER_DTYPE[precision], "trust_remote_code": config.trust_remote_code}
    if config.attention != "auto":
        kwargs["attn_implementation"] = config.attention
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, **kwargs)
    except Exception as error:  # as in `_checked`
        raise ModelError(
            f"model: transformers cannot build a causal LM of type {hf_config.model_type!r}: {first_line(error)}"
        ) from error
    if _sees_ahead(hf_config):
        raise ModelError(
            f"model: {hf_config.model_type!r} is an encoder, whose tokens see the ones they are to predict: "
            "use a decoder, or make it one with model.overrides={is_decoder: true}"
        )
    if MASTER_DTYPE[precision] == torch.bfloat16:
        _keep_in_fp32(model)
    model.train()
    return model


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """The tensors that the architecture's makers keep in fp32 where the rest is of this type."""
    patterns = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    patterns |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    # As in transformers: anywhere in the name.
    found = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)) or r"(?!)")
    return {name for name, tensor in model.state_dict().items() if tensor.is_floating_point() and found.search(name)}


def _keep_in_fp32(model: PreTrainedModel) -> None:
    """Give the buffers among them that type. Weights FSDP could not shard together with others of another type."""
    kept = kept_in_fp32(model, torch.bfloat16)
    weights = sorted(kept & {name for name, _ in model.named_parameters()})
    if weights:
        raise ModelError(
            f"parallel.precision=bf16_pure: {type(model).__name__} keeps {weights[0]} in fp32"
            + (f" (and {len(weights) - 1} more)" if len(weights) > 1 else "")
            + "; use parallel.precision=bf16, whose master weights are fp32"
        )
    for name in kept:
        owner, _, buffer = name.rpartition(".")
        model.get_submodule(owner)._buffers[buffer] = model.get_buffer(name).float()


def _sees_ahead(hf_config: PretrainedConfig) -> bool:
    """Whether this is BERT or one of its kin, which transformers builds as causal LMs without making them causal."""
    encoder = hf_config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return encoder and not hf_config.is_encoder_decoder and getattr(hf_config, "is_decoder", True) is False


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, outermost only: the units of sharding, of activation checkpointing and of compilation."""
    names = set(model._no_split_modules or ())
    found = list(_outermost(model, names))
    if found:
        return found
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(
            f"model: {type(model).__name__} names no blocks (_no_split_modules) and has no list of them: "
            "it cannot be sharded block by block"
        )
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    return list(largest)


def _outermost(module: nn.Module, class_names: set[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in class_names:
            yield child
        else:
            yield from _outermost(child, class_names)


def count_architecture(model: PreTrainedModel) -> Architecture:
    """What the operation count needs, read off the skeleton's shapes rather than off an architecture's conventions."""
    text = model.config.get_text_config()
    output = model.get_output_embeddings()
    inputs = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    weights = sum(_used(p, chosen) for p in model.parameters() if p.ndim >= 2 and id(p) not in inputs)
    if output is not None and id(output.weight) in inputs:  # tied: a lookup on the way in, a product on the way out
        weights += output.weight.numel()
    heads = getattr(text, "num_attention_heads", 0)  # state-space models have none, and no attention to count
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return Architecture(matmul_weights=weights, layers=text.num_hidden_layers, query_width=heads * head_dim)


def _used(weight: nn.Parameter, chosen: int) -> int:
    """The numbers of a weight that a token is multiplied with: of experts, which come stacked, only of the chosen."""
    experts = weight.shape[0] if weight.ndim == 3 and chosen else 1
    return weight.numel() * min(max(1, chosen), experts) // experts


@torch.no_grad()
def init_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, embedding scales): meta tensors until now.

    transformers computes them in `_init_weights`, module by module, and leaves alone what is marked as initialised.
    """
    for tensor in [*model.parameters(), *model.state_dict(keep_vars=True).values()]:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    persistent = set(model.state_dict())
    for prefix, module, owner in _with_owner(model, "", model):
        names = [n for n, _ in module.named_buffers(recurse=False) if _join(prefix, n) not in persistent]
        for name in names:
            module._buffers[name] = _unset(module.get_buffer(name))
        if names:
            owner._init_weights(module)
        for name in names:
            buffer = module.get_buffer(name)
            if buffer.is_floating_point() and buffer.isnan().any():
                raise ModelError(
                    f"model: {type(owner).__name__} does not compute its buffer {_join(prefix, name)} in "
                    "_init_weights, which a network that is built without memory needs"
                )
            module._buffers[name] = buffer.to(device)
        # Rotary modules keep a second reference under another name; it must be the filled one.
        if "inv_freq" in names and "original_inv_freq" not in module._buffers and hasattr(module, "original_inv_freq"):
            module.original_inv_freq = module.get_buffer("inv_freq")


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    """Memory for a buffer, with what shows if nothing computes it, where its type has such a value."""
    unset = torch.empty_like(buffer, device="cpu")
    return unset.fill_(torch.nan) if unset.is_floating_point() else unset.zero_()


def _with_owner(
    module: nn.Module, prefix: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Every module with its name and the model whose `_init_weights` is in charge of it (children first)."""
    if isinstance(module, PreTrainedModel):
        owner = module
    for name, child in module.named_children():
        yield from _with_owner(child, _join(prefix, name), owner)
    yield prefix, module, owner


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
