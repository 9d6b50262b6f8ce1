"""Find out what a network needs of its attention and its loss: tried before a rank is started.

Architectures differ in what reaches their attention. Most pass the borders on, some do not, some never call the
registered attention and say nothing, and state spaces run on whatever they are given. So a small network of the same
config computes packed documents with borders, and each document alone with transformers' eager attention. Where the two
differ, something was not passed on: borders, or a window, a bias, a chunk that only its mask knew.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.config import FinetuneConfig, FullMethod
from raytune_fsdp.model.attention.calls import PREFIX, AttentionDropout, Call, Kernel, Unfit, attend, reference
from raytune_fsdp.model.attention.choose import Heads, KernelNeeds, choose, logits_of, set_attention, takes_position_ids
from raytune_fsdp.model.attention.kernel_trial import why_kernel_fails
from raytune_fsdp.model.attention.lengths import scaled_from, turned_beyond
from raytune_fsdp.model.attention.mixers import is_split, split_mixers
from raytune_fsdp.model.layers import ends_of
from raytune_fsdp.model.network import class_name
from raytune_fsdp.model.objective.chunked_head import has_plain_head, install_chunked_loss
from raytune_fsdp.model.proof import LENGTHS, WINDOW, documents, error_of_loss
from raytune_fsdp.model.split.draws import draws_of, rates_of
from raytune_fsdp.run.trials.mixers import KNOWN, find_mixers
from raytune_fsdp.run.trials.probe import small_network

logger = logging.getLogger(__name__)

_BOUND = 5e-5
"""The largest difference, relative to the largest logit, that is rounding in fp32. Twelve layers have 3e-6."""

_LOSS_BOUND = 1e-5
"""The largest difference of losses that is rounding in fp32."""

_CPU = torch.device("cpu")

_UNTRIED = "it could not be tried"

_CHOSEN = "model.attention says otherwise"

_TRIED = f"{PREFIX}tried"

_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention_window")


def network_needs(config: FinetuneConfig, hf_config: PretrainedConfig, network: PreTrainedModel) -> KernelNeeds:
    """Return what this network, which is on the meta device, needs of its attention and its loss."""
    try:
        with torch.random.fork_rng(devices=[]):
            model = small_network(config, _with_short_windows(hf_config), network)
            _stir(model)
    except Exception as error:  # sizes that cannot be divided, the code of any model
        logger.debug("no small network could be built: %s", in_one_line(error))
        return KernelNeeds(refused=_UNTRIED, plain_loss=_UNTRIED)
    eager = _eager(model)
    plain_loss = _plain_loss(config, model)
    ends = _has_ends(model)
    (refused, heads, unshared), mixers = _borders_and_mixers(config, network, model)
    # The heads of the small network are narrower.
    narrow = () if refused else heads
    full = narrow and _heads_in_full(network, mixers)
    heads = full or tuple(replace(each, width=_width(hf_config)) for each in narrow)
    return KernelNeeds(
        refused=refused,
        unshared=unshared or _changes_by_length(config, hf_config),
        mixers=mixers,
        softcap=any(each.softcap is not None for each in heads),
        sinks=any(each.sinks for each in heads),
        heads=heads,
        eager=eager,
        width=max((each.width for each in heads), default=_width(hf_config)),
        plain_loss=plain_loss,
        ends=ends,
    )


def use_attention_for_packed(config: FinetuneConfig, network: PreTrainedModel, device: torch.device) -> KernelNeeds:
    """Give a loaded model the attention that a run would choose, and return what it needs of one.

    Transformers' own lets packed documents of some networks (gpt-oss) see each other.
    """
    needs = network_needs(config.model_copy(update={"method": FullMethod()}), network.config, network)
    if needs.mixers:
        split_mixers(network, needs.mixers)
    dtype = network.dtype
    set_attention(network, choose(
        "auto", needs, kept=None, device=device, dtype=dtype,
        fails=lambda name: why_kernel_fails(name, needs, device, dtype),
    ))  # fmt: skip
    return needs


@torch.no_grad()
def _eager(model: PreTrainedModel) -> str | None:
    """Return why transformers' sdpa, which most networks have by default, is not to be trusted with this one."""
    # Another path leaves out a cap, a sink or a bias without a word, and no document leaks by it.
    own = model.config._attn_implementation
    if own != "sdpa":
        return None
    batch = documents(model.eval(), _CPU)
    try:
        found = {}
        for name in ("eager", "sdpa"):
            model.set_attn_implementation(name)
            found[name] = logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
    except Exception as error:  # the code of any model
        logger.debug("sdpa was not compared with eager attention: %s", in_one_line(error))
        return None
    finally:
        model.set_attn_implementation(own)
    difference = float((found["sdpa"] - found["eager"]).abs().max() / found["eager"].abs().max())
    return None if difference < _BOUND else "transformers' sdpa computes something else for it than eager attention"


def _plain_loss(config: FinetuneConfig, model: PreTrainedModel) -> str | None:
    """Return why losses have to be computed from logits; None: they need not be."""
    if config.model.head is not None:
        return "its head scores documents"
    if config.model.loss == "plain":
        return "model.loss says so"
    if not has_plain_head(model):
        return "its head is not one linear layer"
    try:
        install_chunked_loss(model)
        with torch.no_grad():
            error = error_of_loss(model.eval(), _CPU)
    except Exception as failed:  # the code of any model
        logger.debug("the loss without logits was tried and failed: %s", in_one_line(failed))
        return _UNTRIED
    return None if error < _LOSS_BOUND else "it does more to its logits than scale and cap them"


@torch.no_grad()
def _has_ends(model: PreTrainedModel) -> bool:
    """Return whether embedding, last norm and head can be gathered on their own.

    They can if they share no weights, and these are used once in a pass and only in their own forward passes.
    """
    calls: Counter[nn.Module] = Counter()
    real: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def gather(module: nn.Module, _: object) -> None:
        calls[module] += 1
        module._parameters.update(real[module])

    def free(module: nn.Module, *_: object) -> None:
        module._parameters.update({name: p if p is None else _on_meta(p) for name, p in real[module].items()})

    batch = documents(model.eval(), _CPU)
    hooks = []
    try:
        first, last = ends_of(model)
        ends = [*first, *last]
        weights = [id(p) for module in ends for p in module.parameters()]
        rest = [id(p) for module in model.modules() if module not in ends for p in module.parameters(recurse=False)]
        if len({*weights}) < len(weights) or {*weights} & {*rest}:
            return False
        for module in ends:
            real[module] = dict(module._parameters)
            hooks += [module.register_forward_pre_hook(gather), module.register_forward_hook(free)]
            free(module)
        logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
        return all(calls[module] == 1 for module in ends)
    except Exception as error:  # weights that are not there, and the code of any model
        logger.debug("ends were tried on their own and failed: %s", in_one_line(error))
        return False
    finally:
        for hook in hooks:
            hook.remove()
        for module, parameters in real.items():
            module._parameters.update(parameters)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


_Tried = tuple[str | None, tuple[Heads, ...], str | None]
"""Why a network cannot be given the borders of documents, what the small one asks of a kernel, and why ranks cannot
share samples even if it can be given them."""


def _borders_and_mixers(
    config: FinetuneConfig, network: PreTrainedModel, model: PreTrainedModel
) -> tuple[_Tried, tuple[str, ...]]:
    """Return what is right for the network's attention, and the classes of its mixers that have to be split for it."""
    if config.model.attention in ("eager", "sdpa", "flex_attention"):
        tried: _Tried = (_CHOSEN, (), None)
    elif not takes_position_ids(network):
        tried = ("it takes no position_ids", (), None)
    else:
        tried = _borders(network, model)
        if tried[0] is None:
            return tried, ()
    if config.data.packing == "none":  # a sample is one document
        return tried, ()
    try:
        mixers = find_mixers(model)
    except Exception as error:  # the code of any model, and packages that need a GPU
        logger.debug("state mixers were looked for and the network failed: %s", in_one_line(error))
        return tried, tuple(sorted({type(module).__name__ for module in network.modules()} & KNOWN))
    if not mixers:
        return tried, ()
    split_mixers(model, mixers)
    again = _borders(network, model)
    if again[0] is not None and not _keeps_apart(model):
        return tried, ()
    return (tried if tried[0] == _CHOSEN else again), mixers


def _keeps_apart(model: PreTrainedModel) -> bool:
    """Return whether transformers' own attention, which takes borders from positions, is right for packed documents."""
    try:
        return _packed_and_alone(model, "eager")[0] < _BOUND
    except Exception as error:  # the code of any model
        logger.debug("packed documents were tried with eager attention and failed: %s", in_one_line(error))
        return False


def _borders(network: PreTrainedModel, model: PreTrainedModel) -> _Tried:
    seen: Counter[Heads] = Counter()
    AttentionInterface.register(_TRIED, partial(attend, partial(_recorded, seen, reference)))
    try:
        difference, drawn = _packed_and_alone(model, _TRIED)
    except AttentionDropout as unfit:
        return str(unfit), (), _drops_attention(network)
    except Unfit as unfit:
        return str(unfit), (), None
    except Exception as error:  # the code of any model
        logger.debug("a network with borders was tried and failed: %s", in_one_line(error))
        return _UNTRIED, (), None
    if not seen and not is_split(model):
        return "its attention is its own", (), None
    refused = None if difference < _BOUND else "it needs more than borders to compute the same"
    return refused, _in_order(seen), _draws_alone(network, drawn) if drawn else None


def _changes_by_length(config: FinetuneConfig, hf_config: PretrainedConfig) -> str | None:
    """Return why ranks cannot share samples if a network asks for the longest document of a micro-batch, or for places
    in a row: each rank would know those of its own part."""
    longest, scaled, many = turned_beyond(hf_config), scaled_from(hf_config), config.train.micro_batch
    if longest is not None and config.data.seq_len > longest:
        return (
            f"its rotary embedding (longrope) is another one where a document is longer than {longest} tokens, and "
            f"ranks that share samples see parts of documents; set data.seq_len={longest}"
        )
    if scaled is not None and config.data.seq_len * many >= scaled:
        return (
            f"it scales queries from token {scaled} of a row on (floor_scale), and ranks that share samples see "
            f"parts of rows; set data.seq_len to less than {-(-scaled // many)}"
        )
    return None


def _drops_attention(network: PreTrainedModel) -> str:
    """Return why ranks cannot share samples if attention drops: a kernel draws a mask as large as the square of a
    sample inside of itself, where nothing can cut it."""
    rates = rates_of(network.config, attention=True)
    return (
        f"attention dropout {_listed(rates)}draws a mask over all pairs of tokens of all heads, and ranks that share "
        f"samples have some heads each; set {_to_zero(rates)}"
    )


def _draws_alone(network: PreTrainedModel, drawn: Sequence[str]) -> str:
    rates = rates_of(network.config, attention=False)
    return (
        f"the code of a {class_name(network)} draws random numbers for each token outside of nn.Dropout "
        f"{_listed(rates)}({', '.join(dict.fromkeys(drawn))}), so that a run would depend on how many ranks share a "
        f"sample; set {_to_zero(rates)}"
    )


def _listed(rates: Mapping[str, float]) -> str:
    return f"({', '.join(f'{name}={value:g}' for name, value in rates.items())}) " if rates else ""


def _to_zero(rates: Mapping[str, float]) -> str:
    return ", ".join(f"model.overrides.{name}=0.0" for name in rates) or "its rate to 0 with model.overrides"


def _recorded(
    seen: Counter[Heads], kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> torch.Tensor:
    many, keys, width = q.shape[1], k.shape[1], q.shape[2]
    sinks = call.sinks is not None
    seen[Heads(many=many, keys=keys, width=width, window=call.window, softcap=call.softcap, sinks=sinks)] += 1
    return kernel(q, k, v, call)


def _in_order(seen: Iterable[Heads]) -> tuple[Heads, ...]:
    return tuple(sorted(seen, key=repr))


@torch.no_grad()
def _heads_in_full(network: PreTrainedModel, mixers: Sequence[str]) -> tuple[Heads, ...]:
    """Return what a network asks of a kernel; nothing if that is not found out. Its copy has no memory."""
    seen: Counter[Heads] = Counter()
    AttentionInterface.register(_TRIED, partial(attend, partial(_recorded, seen, lambda q, k, v, call: q)))
    meta = torch.device("meta")
    try:
        without: dict[int, Any] = {
            id(each): nn.Parameter(each.to(meta), requires_grad=each.requires_grad) for each in network.parameters()
        }
        model = copy.deepcopy(network, without | {id(each): each.to(meta) for each in network.buffers()}).eval()
        if mixers:
            split_mixers(model, mixers)
        model.set_attn_implementation(_TRIED)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # others ask how many tokens an expert gets
        batch = documents(model, meta)
        logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
    except Exception as error:  # what has no rule for shapes, and the code of any model
        logger.debug("the heads of the network in full were not found out: %s", in_one_line(error))
        return ()
    return _in_order(replace(each, layers=layers) for each, layers in seen.items())


def _with_short_windows(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with short windows and chunks: documents of a few tokens are longer."""
    short = copy.deepcopy(hf_config)
    values = vars(short.get_text_config())
    for name in _WINDOWS:
        if isinstance(values.get(name), int) and values[name] > WINDOW:
            values[name] = WINDOW
    return short


@torch.no_grad()
def _packed_and_alone(model: PreTrainedModel, attention: str) -> tuple[float, list[str]]:
    """Return how far logits of documents packed for an attention are from those of each alone, relative to the largest
    logit; and what is drawn at random for tokens in training, and cannot be cut."""
    batch = documents(model, _CPU)
    model.set_attn_implementation(attention)
    model.train()  # dropout is only asked for here
    with draws_of(model, batch.input_ids.numel()) as drawn:
        logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
    model.eval()
    packed = logits_of(model, batch.input_ids, batch.position_ids, batch.borders).flatten(0, 1)
    model.set_attn_implementation("eager")
    each = torch.split(batch.input_ids.flatten(), [length for row in LENGTHS for length in row])
    alone = torch.cat([logits_of(model, ids[None], torch.arange(len(ids))[None])[0] for ids in each])
    return float((packed - alone).abs().max() / alone.abs().max()), drawn


@torch.no_grad()
def _stir(model: PreTrainedModel) -> None:
    """Change weights that are zero at first, as some biases and projections are: they would hide what they multiply."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(0.0, 0.1)


def _width(hf_config: PretrainedConfig) -> int:
    """Return the width of the widest head, by the names that configs have for it."""
    text = hf_config.get_text_config()
    each = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    names = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
    widths = [width for layer in each for name in names if isinstance(width := getattr(layer, name, None), int)]
    return max(widths) if widths else int(text.hidden_size // (getattr(text, "num_attention_heads", None) or 1))
