"""Find whether and how a network can be cut into parts that ranks compute together, by transformers' plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.model.added_rows import EmbeddingWithRows
from raytune_fsdp.model.attention.choose import KernelNeeds

BY_COLUMNS, BY_ROWS, SUMMED, EXPERTS = "colwise", "rowwise", "replicated_with_grad_allreduce", "moe_tp_experts"
"""transformers' names of the ways to cut that are known here."""

_KNOWN = {BY_COLUMNS, BY_ROWS, SUMMED, EXPERTS}
_EXPERTS_ALONE = "ep_dispatch_experts"
"""The name of EXPERTS in a plan for experts alone: gpt-oss has no other plan, and every rank computes its attention."""

_OF_EXPERTS = {"packed_colwise"}
"""transformers' way to cut each expert. Here a rank has some experts, each of them whole."""


def styles_of(network: PreTrainedModel) -> dict[str, str]:
    """Return how the modules between embedding and head are cut, by name; empty if transformers has no plan."""
    plan: dict[str, str] = dict(getattr(network, "tp_plan", None) or {})
    for name, style in dict(getattr(network, "ep_plan", None) or {}).items():
        if style == _EXPERTS_ALONE:
            plan.setdefault(name, EXPERTS)
    ends = {network.get_input_embeddings(), network.get_output_embeddings()}
    found = {}
    for name, module in network.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and module not in ends:
            found[name] = style
    return found


def sharing_heads(network: PreTrainedModel, size: int) -> int:
    """Return how many of `size` ranks that compute layers together share the attention heads.

    All of them do, or one if only experts are divided among ranks.
    """
    return size if size > 1 and BY_COLUMNS in styles_of(network).values() else 1


def holders_of(network: PreTrainedModel, styles: dict[str, str]) -> dict[str, nn.Module]:
    """Return the modules that hold linear layers which are cut by columns, by name."""
    names = {name.rpartition(".")[0] for name, style in styles.items() if style == BY_COLUMNS}
    return {name: network.get_submodule(name) for name in sorted(names)}


def check_cut(size: int, network: PreTrainedModel, needs: KernelNeeds) -> None:
    """Refuse, before a rank is started, a network whose layers `size` ranks cannot compute together."""
    if size == 1:
        return
    field, kind = f"parallel.mesh.tensor={size}", type(network).__name__
    styles = styles_of(network)
    if needs.mixers:
        raise ConfigError(
            f"{field}: a {kind} cannot be cut here: its state mixers ({', '.join(needs.mixers)}) are called for one "
            "document after the other, which was never tried among ranks that share layers; set parallel.mesh.tensor=1"
        )
    if not styles:
        raise ConfigError(
            f"{field}: transformers does not say how a {kind} is cut; it does for {', '.join(_planned())}; set "
            "parallel.mesh.tensor=1"
        )
    if problem := next(_unfit(network, styles), None) or _of_ends(network, needs):
        raise ConfigError(f"{field}: a {kind} cannot be cut here: {problem}; set parallel.mesh.tensor=1")
    for what, count in _counts(network, styles, needs):
        if count % size:
            valid = [each for each in range(1, count + 1) if count % each == 0]
            raise ConfigError(f"{field}: it must divide the {count} {what} of a {kind}; valid: {valid}")


def _planned() -> list[str]:
    """Return the architectures whose plan in transformers has only ways to cut that are known here."""
    found = []
    for name in CONFIG_MAPPING.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        plan = getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None) or {}
        if plan and {*plan.values()} <= _KNOWN | _OF_EXPERTS:
            found.append(name)
    return sorted(found)


def _unfit(network: PreTrainedModel, styles: dict[str, str]) -> Iterator[str]:
    for name, style in styles.items():
        if style not in _KNOWN:
            yield f"{name} would be cut in the way {style!r}"
        module = network.get_submodule(name)
        linear = getattr(module, "base_layer", module)
        if style in (BY_COLUMNS, BY_ROWS) and not isinstance(linear, nn.Linear):
            yield f"{name} is not a linear layer"
    for name, holder in holders_of(network, styles).items():
        own = {styles.get(f"{name}.{child}") for child, _ in holder.named_children()}
        if BY_ROWS not in own:
            yield f"no layer of {name} adds up what the ranks have computed"
        left = [
            child
            for child, each in holder.named_children()
            if f"{name}.{child}" not in styles and any(True for _ in each.parameters())
        ]
        left += [own for own, each in holder.named_parameters(recurse=False) if each is not None]
        if left:
            yield f"{name}.{left[0]} is not in transformers' plan"


def _of_ends(network: PreTrainedModel, needs: KernelNeeds) -> str | None:
    embedding = network.get_input_embeddings()
    if isinstance(embedding, EmbeddingWithRows):
        return "rows of new tokens are trained alone (method.train_added_tokens)"
    scaled = isinstance(embedding, nn.Embedding) and hasattr(embedding, "embed_scale")
    if type(embedding) is not nn.Embedding and not scaled:
        return f"its embedding is a {type(embedding).__name__}"
    if needs.plain_loss:
        return f"nobody would have its logits, and the loss needs them ({needs.plain_loss})"
    drops = [name for name, value in vars(network.config.get_text_config()).items()
             if re.search(r"att.*drop|drop.*att", name) and isinstance(value, float) and value > 0]  # fmt: skip
    return f"its attention has dropout ({drops[0]}), whose masks are drawn for all heads" if drops else None


def _counts(network: PreTrainedModel, styles: dict[str, str], needs: KernelNeeds) -> Iterator[tuple[str, int]]:
    """Yield what is divided among ranks, each with the count that the number of ranks has to divide."""
    if BY_COLUMNS in styles.values():
        text = network.config.get_text_config()
        heads = text.num_attention_heads
        keys = getattr(text, "num_key_value_heads", None) or heads
        yield "attention heads", math.gcd(heads, *(each.many for each in needs.heads))
        yield "key heads", math.gcd(keys, *(each.keys for each in needs.heads))
    sides, experts = [], []
    for name, style in styles.items():
        module = network.get_submodule(name)
        linear = getattr(module, "base_layer", module)
        if style == EXPERTS:
            experts += [parameter.shape[0] for parameter in module.parameters(recurse=False)]
        elif isinstance(linear, nn.Linear):
            sides.append(linear.out_features if style == BY_COLUMNS else linear.in_features)
    yield "columns of its layers (their greatest common divisor)", math.gcd(*sides)
    if experts:
        yield "experts", math.gcd(*experts)
