"""Try one step of a small part of the network before a rank is started: some configs fail only in such a step.

The part is the first layers, one of each kind at least. It is really computed, on the CPU: as it is if it is small,
otherwise at a fraction of its widths. If that fails, it may be for the widths; so the part is then computed at its own
ones, with fake tensors, which have shapes and no memory, and last the whole network. Only what fails every time is
refused. If a step fails for a reason of the probe's own, the run continues: the ranks try it for real.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.errors import ModelError, in_one_line
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelNeeds, logits_of
from raytune_fsdp.model.attention.mixers import split_mixers
from raytune_fsdp.model.directory.bounds import unknown_word
from raytune_fsdp.model.layers import set_training_forward
from raytune_fsdp.model.network import build_network, init_buffers
from raytune_fsdp.model.objective.loss import token_loss_sum
from raytune_fsdp.model.proof import leak_between_documents
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.run.trials.computation import refuse_leak

logger = logging.getLogger(__name__)

_SMALL = 40_000_000
"""The most weights that are really computed: with gradients 320 MB, and about a second on one slow core."""

_MOST_BLOCKS = 12
"""Layers after this many are not looked at for another kind (from the 20th on, some of a Gemma 4 have no keys)."""

_LENGTH = 16
"""Tokens of a sequence: state spaces without kernels go through them one by one, and a fake operation takes 0.3 ms."""

_WIDTH = 64
"""The hidden size to which a large network is shrunk, or somewhat more."""

_TOKENS = 4096
"""The vocabulary to which a large network is shrunk."""

_EXPERTS = 16
"""The number of experts to which a large network is shrunk, or somewhat more: mostly 8 of them are chosen."""

_SIZES = (
    "_size",
    "_dim",
    "_rank",
    "_width",
    "d_model",
    "d_ff",
    "d_head",
    "headdim",
    "ffn_dim",
    "n_embd",
    "n_inner",
    "kv_channels",
)
_NO_SIZES = ("window", "chunk", "block_size", "patch", "image", "kernel", "state_size", "conv", "group")


def check_step(
    config: FinetuneConfig, hf_config: PretrainedConfig, network: PreTrainedModel, needs: KernelNeeds
) -> None:
    """Refuse a network whose first step would fail, and packing for one in which documents would see each other.

    `network` is what `hf_config` describes, on the meta device, and stays as it is.
    """
    try:
        model = _part(config, hf_config, network)
        real = _weights(model) <= _SMALL
        error = _step(config, model, real=real)
    except Exception as unfit:  # sizes that cannot be divided
        error = unfit
    if error is None:
        if real and needs.refused:  # with borders, packed documents have been compared with the same ones alone
            _check_packing(config, model, needs)
        return
    certain = _fails_at_full_width(config, hf_config)
    if certain is not None:
        raise ModelError(_message(config, hf_config, network, certain)) from certain
    logger.debug("one step was tried and says nothing: %s", in_one_line(error))


def _part(config: FinetuneConfig, hf_config: PretrainedConfig, network: PreTrainedModel) -> PreTrainedModel:
    """Return the first layers of a network, at a fraction of its widths if it is large."""
    return first_layers(_build(config, hf_config if _weights_of_part(network) <= _SMALL else shrunk(hf_config)))


def small_network(config: FinetuneConfig, hf_config: PretrainedConfig, network: PreTrainedModel) -> PreTrainedModel:
    """Return the first layers of a network with random weights, on the CPU, narrower if it is large.

    `network` has the sizes of `hf_config`.
    """
    model = _part(config, hf_config, network)
    if _weights(model) > _SMALL:
        raise MemoryError(f"{_weights(model):,} weights are too many to try")
    with torch.random.fork_rng(devices=[]):
        fill_small(model)
    return model.float()


def _fails_at_full_width(config: FinetuneConfig, hf_config: PretrainedConfig) -> Exception | None:
    error = None
    # Some networks count their layers, and an xLSTM takes only multiples of its chunks: the whole has the last word, at
    # the length that the run will have.
    for first, length, fake in ((True, _LENGTH, False), (False, _LENGTH, False), (False, config.data.seq_len, True)):
        try:
            model = _build(config, hf_config)
            model = first_layers(model) if first else model
        except Exception:  # the network was built before: it is not for this to refuse it
            return None
        error = _step(config, model, real=not fake and _weights(model) <= _SMALL, length=length)
        if error is None or not _conclusive(config, model, error):
            return None
    return error


def _message(config: FinetuneConfig, hf_config: PretrainedConfig, network: PreTrainedModel, error: Exception) -> str:
    chosen = config.model
    if chosen.overrides:
        changes = ", ".join(f"{key}={value!r}" for key, value in chosen.overrides.items())
        where, way_out = f"model.overrides ({changes})", "take back the one that does not fit the others"
    elif chosen.architecture is not None:
        where, way_out = f"model.architecture ({hf_config.model_type})", "correct the sizes that do not fit each other"
    else:
        where = f"model.path={chosen.path}"
        way_out = "correct its config.json, try model.attention=eager, or use another model"
    reason = unknown_word(hf_config, error) or in_one_line(error)
    return f"{where}: the first step of a {type(network).__name__} fails: {reason}; {way_out}"


def _build(config: FinetuneConfig, hf_config: PretrainedConfig) -> PreTrainedModel:
    """Build the network as the ranks do, on the meta device, with an attention that runs on a CPU."""
    model = build_network(copy.deepcopy(hf_config), config)
    if _other_attention(config):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    set_training_forward(
        model, recompute=config.parallel.activation_checkpointing, every=config.parallel.recompute_every
    )
    return model


def _weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def first_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Cut the lists of layers where every kind of layer has come, but not before two."""
    for parent, name, kept, _ in _lists(model):
        setattr(parent, name, nn.ModuleList(kept))
    return model


def _weights_of_part(model: PreTrainedModel) -> int:
    """Return the number of weights that `first_layers` would leave."""
    lists = list(_lists(model))
    cut = {id(p): p.numel() for _, _, _, rest in lists for layer in rest for p in layer.parameters()}
    left = {id(p) for _, _, kept, _ in lists for layer in kept for p in layer.parameters()}  # layers may share some
    return _weights(model) - sum(size for key, size in cut.items() if key not in left)


def _lists(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, list[nn.Module], list[nn.Module]]]:
    """Yield every list of layers: its parent, its name there, the first layers and the others."""
    names = set(model._no_split_modules or ())
    for parent in list(model.modules()):
        for name, layers in list(parent.named_children()):
            if isinstance(layers, nn.ModuleList) and any(type(layer).__name__ in names for layer in layers):
                kinds = [(type(layer), *(tuple(p.shape) for p in layer.parameters())) for layer in layers]
                last = max(kinds.index(kind) for kind in kinds)
                kept = min(_MOST_BLOCKS, max(2, last + 1))
                yield parent, name, list(layers)[:kept], list(layers)[kept:]


class _Untried(Exception):
    """The step was not reached."""


def _step(config: FinetuneConfig, model: PreTrainedModel, *, real: bool, length: int = _LENGTH) -> Exception | None:
    """Compute forward and backward, and return what went wrong. A real network has its memory afterwards."""
    # Random numbers are keyed everywhere, but a caller's own are left alone.
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            tensors = fill_small(model) if real else _with_fake_tensors(model)
        except Exception as error:
            return _Untried(in_one_line(error))
        try:
            with tensors:
                _forward_and_backward(model, min(config.data.seq_len, length), config.data.packing != "none")
        except Exception as error:  # the code of any model, and of whatever it calls
            return error
    return None


def _forward_and_backward(model: PreTrainedModel, length: int, packed: bool) -> None:
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(length) % vocabulary)[None]
    positions = torch.arange(length) % (max(1, length // 2) if packed else length)
    logits = logits_of(model, ids, positions[None])
    loss = token_loss_sum(logits, ids) if head_of(model) is None else logits.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def _with_fake_tensors(model: PreTrainedModel) -> AbstractContextManager[object]:
    # Imported here: it brings half of the compiler, a second that small networks do not need to wait for.
    from torch._subclasses import FakeTensorMode

    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the shape rule of grouped products is for bf16 on GPUs only
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        with_memory(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), buffers=True)
    return mode


def fill_small(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Fill weights and buffers as transformers draws them. What it does not draw is zero."""
    torch.manual_seed(0)
    with_memory(model, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), buffers=False)
    with torch.no_grad():
        for module in reversed(list(model.modules())):
            model._init_weights(module)
    init_buffers(model, torch.device("cpu"))
    return nullcontext()


def with_memory(model: PreTrainedModel, make: Callable[[torch.Tensor], torch.Tensor], *, buffers: bool) -> None:
    """Put tensors with memory in place of those on the meta device; tied ones stay tied.

    Without `buffers` those that are computed, not stored, stay where they are.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffers or name not in module._non_persistent_buffers_set):
                module._buffers[name] = make(buffer)


def _conclusive(config: FinetuneConfig, model: PreTrainedModel, error: Exception) -> bool:
    """Return whether a rank would fail too, for the same reason."""
    if isinstance(error, _Untried | MemoryError | ImportError | torch.OutOfMemoryError):
        return False
    # What a fake tensor cannot do: say a value, or a shape that values decide, or run an operation without a shape
    # rule.
    if type(error).__module__.startswith(("torch._subclasses", "torch.fx", "torch._dynamo", "torch._inductor")):
        return False
    text = str(error).lower()
    if any(word in text for word in ("faketensor", "fake tensor", "data pointer", "alloc", "meta tensor", "symbolic")):
        return False
    other = config.cluster.device != "cpu" and (config.cluster.launch != "local" or torch.cuda.is_available())
    if not (other or _other_attention(config)):  # the run computes as the probe does
        return True
    # Kernels that only a GPU has, and code of others that asks for one in words that nobody knows.
    kernels = ("cpu", "cuda", "gpu", "triton", "kernel", "driver", "device", "not implemented")
    return _is_ours(model) and not isinstance(error, NotImplementedError) and not any(word in text for word in kernels)


def _is_ours(model: PreTrainedModel) -> bool:
    """Return whether the network is of transformers, not of code that came with a model."""
    return type(model).__module__.startswith("transformers.")


def _other_attention(config: FinetuneConfig) -> bool:
    return not config.model.chooses_attention and config.model.attention not in ("eager", "sdpa")


def _check_packing(config: FinetuneConfig, model: PreTrainedModel, needs: KernelNeeds) -> None:
    """Refuse to pack documents for a network in which they see each other. Needs the memory that a step leaves."""
    # Flash kernels find the borders where sdpa may not. In transformers nothing else does: state mixers run on unless
    # they are split. Code that comes with a model may be of any kind, and is tried by the ranks.
    if config.data.packing == "none" or _other_attention(config) or not _is_ours(model):
        return
    try:
        if needs.mixers:
            split_mixers(model, needs.mixers)
        with torch.no_grad():
            change = leak_between_documents(model.eval(), torch.device("cpu"))
    except Exception as error:
        logger.debug("whether packed documents see each other was not found out: %s", in_one_line(error))
        return
    refuse_leak(model, config.data.packing, change)


def shrunk(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the same architecture, narrower: all sizes are divided by one power of two, so that they
    still fit each other."""
    small = copy.deepcopy(hf_config)
    text = small.get_text_config()
    values = vars(text)
    head = values.get("head_dim") or text.hidden_size // (getattr(text, "num_attention_heads", None) or 1)
    factor = 1
    # Not below 8 in a head: half of it, or a quarter, is rotated in pairs.
    while text.hidden_size // factor >= 2 * _WIDTH and head // factor >= 16:
        factor *= 2
    for name, value in list(values.items()):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if "vocab" in name:
            values[name] = min(value, _TOKENS)
        elif name.endswith("token_id"):
            values[name] = value % _TOKENS
        elif "experts" in name and "per_tok" not in name:
            while not value % 2 and value >= 2 * _EXPERTS:
                value //= 2
            values[name] = value
        elif any(part in name for part in _SIZES) and not any(part in name for part in _NO_SIZES):
            values[name] = value // factor if not value % factor else value
    return small
