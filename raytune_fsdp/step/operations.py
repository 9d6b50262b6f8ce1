"""Read a network's shapes for the count of operations: configs of architectures name their sizes differently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.model.added_rows import EmbeddingWithRows
from raytune_fsdp.model.layers import ends_of, layers_of
from raytune_fsdp.step.flops import Architecture, Products

_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""Configs' names for the number of experts that a token goes through."""


_WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "recurrent", "moe", "mlp")
"""Configs' names for layers of hybrids that have no attention. What else their state mixers do than products with
weights is about a hundredth of these, and does not count."""


def count_architecture(model: PreTrainedModel) -> Architecture:
    """Count the products of a network on the meta device, before it is sharded, by the shapes of whole weights."""
    text = model.config.get_text_config()
    output = model.get_output_embeddings()
    of_head = {id(p) for p in output.parameters()} if output is not None else set()
    lookups = nn.Embedding | EmbeddingWithRows
    inputs = {id(p) for m in model.modules() if isinstance(m, lookups) for p in m.parameters(recurse=False)}
    places = _places(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    first = min((places[id(p)] for p in trained), default=len(places))
    # A tied embedding is a lookup on the way in, and a product on the way out.
    matrices = [(p, count) for p, count in _matrices(model) if id(p) not in inputs]
    tied = [(p, p.numel()) for p in output.parameters() if p.ndim >= 2 and id(p) in inputs] if output else []
    every = [(p, count, places[id(p)] < first) for p, count in matrices if id(p) not in of_head]
    # If only the head is trained, its input needs no gradient.
    alone = all(id(p) in of_head - inputs for p in trained)
    head = [(p, count, alone) for p, count in [*matrices, *tied] if id(p) in of_head]
    # Gemma 4 has wider heads in some layers than in others, and its config refuses to give one width for all.
    each = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    layers = getattr(text, "num_hidden_layers", 0)  # BLT has several decoders, each with its own
    return Architecture(
        every_token=_summed(every),
        targets=_summed(head),
        layers=layers,
        leading_layers=min(layers, max(0, first - 1)),
        query_width=_attending(text) * sum(map(_query_width, each)) / len(each),
    )


def count_asleep(model: PreTrainedModel) -> int:
    """Count the numbers that a token is not multiplied with: those of the experts that it does not go to."""
    return sum(weight.numel() - count for weight, count in _matrices(model))


def _places(model: PreTrainedModel) -> dict[int, int]:
    """Return the order in which weights are used, by their ids: 0 before the layers, then a number for each layer."""
    layers = layers_of(model)
    places = {id(p): 0 for p in model.parameters()}
    if model.get_output_embeddings() is not None:
        places |= {id(p): len(layers) + 1 for module in ends_of(model)[1] for p in module.parameters()}
    places |= {id(p): number for number, layer in enumerate(layers, 1) for p in layer.parameters()}
    return places | {id(p): 0 for p in model.get_input_embeddings().parameters()}  # even if it is also the head


def _matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield all weights of products, each with how many of its numbers a token is multiplied with."""
    text = model.config.get_text_config()
    chosen = next((n for name in _CHOSEN if isinstance(n := getattr(text, name, None), int)), 0)
    # PEFT adapts all experts with one pair of matrices, whose rank is that of all experts together.
    of_experts = {
        id(p): module.get_param().shape[0]
        for module in model.modules()
        if type(module).__name__ == "ParamWrapper" and module.get_param().ndim == 3
        for name, p in module.named_parameters()
        if ".original_module." not in name and name.startswith("lora_")
    }
    for name, weight in model.named_parameters():
        # Vectors (norms, biases) are in no product; biases of experts are stacked. The original that PEFT keeps of a
        # module that is trained whole is not used.
        if weight.ndim < 2 or name.endswith("bias") or ".original_module." in name:
            continue
        experts = of_experts.get(id(weight), weight.shape[0] if weight.ndim == 3 else 1)
        few = experts > 1 and chosen > 0
        yield weight, weight.numel() * min(chosen, experts) // experts if few else weight.numel()


def _summed(products: Iterable[tuple[nn.Parameter, int, bool]]) -> Products:
    found = list(products)
    return Products(
        weights=sum(count for _, count, _ in found),
        frozen=sum(count for weight, count, _ in found if not weight.requires_grad),
        leading=sum(count for _, count, leading in found if leading),
    )


def _attending(text: PretrainedConfig) -> float:
    """Return the share of the layers that have attention: those of a hybrid are of several kinds."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ["attention"]
    return sum(kind not in _WITHOUT_ATTENTION for kind in kinds) / len(kinds)


def _query_width(layer: PretrainedConfig) -> float:
    heads = getattr(layer, "num_attention_heads", None) or 0  # state-space models have none, and no attention to count
    # The two products of a pair, with the key and with the value: DeepSeek's heads have other widths for either, and
    # its `head_dim` is only the part of a key that is rotated.
    if (key := getattr(layer, "qk_head_dim", None)) and (value := getattr(layer, "v_head_dim", None)):
        return float(heads * (key + value) / 2)
    return float(heads * (getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)))
