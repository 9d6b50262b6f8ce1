"""Find a network's state mixers by trying, and a way to call them.

State mixers are modules that mix tokens without attention.

The small network of the trials computes one text. Then each module of a layer computes what it was given once more, in
two halves. What is another result in the second half looks back at earlier tokens. Attention does so, too: it is known
by the mask of pairs that it is given. What is found is only a guess: `needs.py` then compares packed documents with
each alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import why_on_any_rank
from raytune_fsdp.base.errors import ConfigError, in_one_line
from raytune_fsdp.model.attention.choose import Fails, KernelChoice
from raytune_fsdp.model.attention.mixers import BY_DOCUMENT, WITH_BORDERS, Documents, split_mixer, split_mixers
from raytune_fsdp.model.layers import layers_of

logger = logging.getLogger(__name__)

KNOWN = frozenset({
    "BailingHybridDeltaAttention", "BambaMixer", "FalconH1Mixer", "FalconMambaMixer", "GraniteMoeHybridMambaLayer",
    "JambaMambaMixer", "KimiLinearDeltaAttention", "Lfm2MoeShortConv", "Lfm2ShortConv", "Mamba2Mixer", "MambaMixer",
    "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet", "Zamba2MambaMixer", "ZambaMambaMixer",
})  # fmt: skip
"""State mixers of transformers, as trying them has shown. Where a package computes for GPUs alone, nothing can be tried
on a CPU, and these are split untried: ranks look for leaks themselves."""

_LENGTH = 12

_LENGTHS = (97, 1, 40, 150)
"""Documents with which calls of a mixer are tried."""

_ERROR = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 4e-2}
"""The largest error of a mixer, relative to the largest value. One token of another document makes it 1."""

_DECAY = {"A_log": -3.0, "dt_bias": 0.0}
"""Values with which states last for dozens of tokens. As they are drawn, most are gone after one, and so is a leak."""

_BOUND = 5e-5
"""The largest difference, relative to the largest result, that is rounding in fp32."""

_Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""What a module was called with, and what it returned."""


def choose_mixers(
    model: PreTrainedModel, names: tuple[str, ...], *, kept: str | None, device: torch.device, fails: Fails
) -> KernelChoice:
    """Keep documents apart in a network's mixers of these classes; return the way, and why.

    `kept`: the way in which its checkpoint was trained; None: no checkpoint yet. On GPUs all ranks alike call `fails`
    for one way after the other, until one does not fail.
    """
    failed: list[str] = []
    if kept in WITH_BORDERS and device.type != "cuda":
        failed.append(f"{kept}, as the run began: needs a GPU")
    elif kept != BY_DOCUMENT and device.type == "cuda":
        for way in sorted(WITH_BORDERS, key=lambda way: way != kept):
            reason = fails(way)
            if reason is None:
                split_mixers(model, names, way)
                why = "as the run began" if way == kept else "its kernels take borders"
                return KernelChoice(name=way, why=f"{why} ({'; '.join(failed)})" if failed else why)
            failed.append(f"{way}{', as the run began' if way == kept else ''}: {reason}")
    split_mixers(model, names)
    why = "as the run began" if kept == BY_DOCUMENT else f"{', '.join(names)} would run on into the next document"
    return KernelChoice(name=BY_DOCUMENT, why=f"{why} ({'; '.join(failed)})" if failed else why)


_NOT_REPEATED = "does not have a deterministic implementation"
"""What torch says of its own operations, in its deterministic mode."""


def why_borders_fail(
    way: str, model: PreTrainedModel, names: Collection[str], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why mixers that are given borders compute something else than for each document, or None.

    One mixer of each class and shape is tried, forward and backward, in the sizes of the run: kernels may depend on
    them, and layers may differ, or have adapters in some only. `model` is on the meta device.
    """
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for name, mixer in _kinds(model, names):
                for what, error in _errors(way, model, mixer, device, dtype):
                    if not error <= _ERROR[dtype]:  # written so that NaN fails, too
                        return f"{what} of {name} is off by {error:.1e} from that of each document"
    except Exception as error:  # whatever a package raises; a rank that ends here would leave the others waiting
        return in_one_line(error)
    return None


def check_bits(
    way: str, model: PreTrainedModel, names: Collection[str], device: torch.device, dtype: torch.dtype, *, begins: bool
) -> None:
    """Refuse a new run that is to repeat its bits, and whose mixers do not; one that has begun goes on. Collective.

    Packages outside of torch do not know its deterministic mode: most of their backwards add in any order.
    """
    reason = why_on_any_rank(lambda: _why_bits_change(way, model, names, device, dtype))
    if reason is None:
        return
    packages = (
        ", by a package outside of torch (mamba-ssm, causal-conv1d, flash-linear-attention): uninstall it on all nodes "
        "if what torch has in its place repeats its bits, or"
    )
    said = f"run.deterministic (or run.exact): {reason}{';' if _NOT_REPEATED in reason else packages} set both to false"
    if begins:
        raise ConfigError(said)
    logger.warning("%s; the run goes on as it began", said)


def _why_bits_change(
    way: str, model: PreTrainedModel, names: Collection[str], device: torch.device, dtype: torch.dtype
) -> str | None:
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for name, mixer in _kinds(model, names):
                own, states, weights = _made(model, mixer, device, dtype)
                first, second = (_values_and_gradients(way, own, states, weights) for _ in range(2))
                for (what, one), (_, other) in zip(first, second, strict=True):
                    if not torch.equal(one, other):
                        return f"{what} of {name} has other bits the second time"
    except Exception as error:  # what cannot be called alone says nothing of bits
        if _NOT_REPEATED in str(error):  # as cumsum, on GPUs
            return f"{' and '.join(names)}: {in_one_line(error).partition(', but')[0]}"
        logger.debug("a mixer's bits were not tried: %s", in_one_line(error))
    return None


def _kinds(model: PreTrainedModel, names: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield a mixer of each class and shape, with the name of its class."""
    kinds: dict[tuple[str, Any], nn.Module] = {}
    for module in model.modules():
        if type(module).__name__ in names:
            shapes = tuple((name, each.shape) for name, each in module.named_parameters())
            kinds.setdefault((type(module).__name__, shapes), module)
    yield from ((name, mixer) for (name, _), mixer in kinds.items())


def _errors(
    way: str, model: PreTrainedModel, mixer: nn.Module, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, float]]:
    """Yield the relative error of the result and of each gradient against calls for documents."""
    own, states, weights = _made(model, mixer, device, dtype)
    found = [_values_and_gradients(each, own, states, weights) for each in (way, BY_DOCUMENT)]
    for (what, ours), (_, right) in zip(*found, strict=True):
        yield what, float((ours.float() - right.float()).abs().max() / right.float().abs().max().clamp(min=1e-30))


def _made(
    model: PreTrainedModel, mixer: nn.Module, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a mixer like this one, what goes into it, and the gradient of what comes out: the same each time."""
    torch.manual_seed(0)
    own = _with_values(model, mixer, device, dtype)
    shape = (1, sum(_LENGTHS), model.config.get_text_config().hidden_size)
    states, weights = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return own, states, weights


@torch.no_grad()
def _with_values(model: PreTrainedModel, mixer: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a mixer like this one, with values as a new network has them."""
    own = copy.deepcopy(mixer).to_empty(device=device)
    for buffer in own.buffers():
        buffer.fill_(1.0)  # Falcon-H1's factors are computed elsewhere
    for parameter in own.parameters():
        parameter.normal_(0.0, 0.02)  # adapters, and what the model's code leaves as it is
    for module in reversed(list(own.modules())):
        model._init_weights(module)
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # it would drop others in other calls
    for name, parameter in own.named_parameters():
        if name.rpartition(".")[2] in _DECAY:
            parameter.fill_(_DECAY[name.rpartition(".")[2]])
    return own.to(dtype).train()


@torch.enable_grad()
def _values_and_gradients(
    way: str, mixer: nn.Module, states: torch.Tensor, weights: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    documents, states = Documents(way), states.clone().requires_grad_()
    split_mixer(mixer, documents)
    documents.begin(_LENGTHS, states.device)
    parameters = {name: each.requires_grad_() for name, each in mixer.named_parameters()}
    result = mixer(states)
    gradients = torch.autograd.grad(result, [states, *parameters.values()], weights, allow_unused=True)
    found = [
        (f"the gradient of {name}", each) for name, each in zip(["the input", *parameters], gradients, strict=True)
    ]
    return [("the result", result.detach()), *((what, each) for what, each in found if each is not None)]


@torch.no_grad()
def find_mixers(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the classes of a small network's state mixers. Leaves it with eager attention."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        calls.setdefault(module, (args, kwargs, result))

    layers = layers_of(model)
    hooks = [module.register_forward_hook(note, with_kwargs=True) for layer in layers for module in layer.modules()]
    model.set_attn_implementation("eager")
    ids = (torch.arange(_LENGTH) % model.config.get_text_config().vocab_size)[None]
    try:
        model.eval()(input_ids=ids, position_ids=torch.arange(_LENGTH)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found = {type(each) for layer in layers for each in _mixers(layer, calls)}
    # A layer of Zamba may be inside of another layer: its mixer is enough.
    around = {
        type(module) for module in model.modules()
        if type(module) in found and any(type(each) in found for each in module.modules() if each is not module)
    }  # fmt: skip
    return tuple(sorted(kind.__name__ for kind in found - around))


def _mixers(module: nn.Module, calls: dict[nn.Module, _Call]) -> Iterator[nn.Module]:
    """Yield the outermost state mixers inside of a module."""
    for child in module.children():
        if child not in calls or any(_attends(calls[each]) for each in child.modules() if each in calls):
            yield from _mixers(child, calls)
        elif _looks_back(child, calls[child]):
            yield child


def _attends(call: _Call) -> bool:
    return any(each.ndim == 4 and each.shape[-2:] == (_LENGTH, _LENGTH) for each in _tensors(call[:2]))


def _looks_back(module: nn.Module, call: _Call) -> bool:
    args, kwargs, result = call
    if not all(each.shape[:2] == (1, _LENGTH) for each in [*_tensors((args, kwargs))[:1], *_tensors(result)]):
        return False
    half = _LENGTH // 2
    args, kwargs = pytree.tree_map(
        lambda each: each[:, half:] if isinstance(each, torch.Tensor) and each.shape[:2] == (1, _LENGTH) else each,
        (args, kwargs),
    )
    alone = type(module).forward(module, *args, **kwargs)
    pairs = zip(_tensors(result), _tensors(alone), strict=True)
    return any(bool((whole[:, half:] - own).abs().max() > _BOUND * whole.abs().max()) for whole, own in pairs)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
