"""Flash attention on GPUs, of torch and of the flash-attn packages, that is told where documents begin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Any, cast

import torch

from raytune_fsdp.model.attention.calls import PREFIX, Call, Unfit, gradient_of_sinks, with_sinks, without_softcap

FLASH = {f"{PREFIX}fa4": "flash-attn-4", f"{PREFIX}fa3": "flash-attn-3", f"{PREFIX}fa2": "flash-attn"}
"""The kernels of flash-attn and the distributions that they come in, the fastest first."""

_MODULES = {
    f"{PREFIX}fa4": ("flash_attn.cute", "flash_attn_varlen_func"),
    f"{PREFIX}fa3": ("flash_attn_interface", "flash_attn_varlen_func"),
    f"{PREFIX}fa2": ("flash_attn", "flash_attn_varlen_func"),
    f"{PREFIX}varlen": ("torch.nn.attention.varlen", "varlen_attn"),
}
"""Where the functions are that kernels call."""


def is_installed(name: str) -> bool:
    """Whether what a kernel calls has been installed; not whether it runs."""
    if name == f"{PREFIX}fa3":  # in a module of its own, from several distributions
        return find_spec(_MODULES[name][0]) is not None
    if name not in FLASH:
        return True
    # Versions 2 and 4 are in one package, and version 2 comes with the files of 4, without what those import.
    try:
        return distribution(FLASH[name]) is not None
    except PackageNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of a package, and which of the arguments that not all versions have it takes."""

    call: Callable[..., Any]
    takes: frozenset[str]


_FUNCTIONS: dict[str, _Function] = {}
"""By kernel. An import, or a look at a signature, breaks a compiled graph in two: `load` does both beforehand."""


def load(name: str) -> None:
    """Import what a kernel calls."""
    if name in _MODULES:
        module, function = _MODULES[name]
        call = getattr(import_module(module), function)
        _FUNCTIONS[name] = _Function(call, frozenset(inspect.signature(call).parameters))


def _function(name: str) -> _Function:
    if name not in _FUNCTIONS:
        load(name)
    return _FUNCTIONS[name]


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """torch's own flash attention over documents."""
    without_softcap(call)
    starts, longest = call.borders.starts, call.borders.longest
    if call.sinks is not None:
        out, _ = _varlen_with_sinks(q, k, v, starts, longest, call.scale, call.window or 0, call.sinks)
        return cast(torch.Tensor, out)
    function = _function(f"{PREFIX}varlen")
    # torch 2.11 has grouped heads without this flag.
    grouped: dict[str, Any] = {}
    if "enable_gqa" in function.takes and q.shape[1] != k.shape[1]:
        grouped["enable_gqa"] = True
    out = function.call(
        q, k, v, starts, starts, longest, longest, scale=call.scale, window_size=_before(call.window), **grouped
    )
    return cast(torch.Tensor, out)


# varlen_attn returns log-sum-exps, but its backward ignores their gradients: so this is an operation of its own.
@torch.library.custom_op("raytune_fsdp::varlen_attention_with_sinks", mutates_args=())
def _varlen_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, window == 0, False, scale=scale, **_sides(window)
    )
    return with_sinks(out, sums.transpose(0, 1), sinks)


@_varlen_with_sinks.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("raytune_fsdp::varlen_attention_with_sinks_backward", mutates_args=())
def _varlen_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, sums.transpose(0, 1).contiguous(), starts, starts, longest, longest, 0.0, window == 0,
        *no_dropout, scale=scale, **_sides(window),
    )  # fmt: skip
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple(grads))


@_varlen_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _remember_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, starts, ctx.longest, ctx.scale, ctx.window, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, starts, sinks)


def _back_through_varlen(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, sums, starts, sinks = ctx.saved_tensors
    grads = _varlen_backward(grad, q, k, v, out, sums, starts, ctx.longest, ctx.scale, ctx.window)
    return (*grads, None, None, None, None, gradient_of_sinks(grad, out, sums, sinks))


_varlen_with_sinks.register_autograd(_back_through_varlen, setup_context=_remember_varlen)


def _sides(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0}


def flash(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """The flash-attn packages; they agree on these arguments, and the newer ones return a tuple."""
    if call.sinks is not None:  # their backward has no gradient for the sums that they return
        raise Unfit("it has attention sinks")
    function = _function(name)
    starts, longest = call.borders.starts, call.borders.longest
    repeatable: dict[str, Any] = {}
    if "deterministic" in function.takes:  # torch's setting does not reach it
        repeatable["deterministic"] = torch.are_deterministic_algorithms_enabled()
    out = function.call(
        q, k, v,
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=call.scale, causal=True, window_size=_before(call.window), softcap=call.softcap or 0.0,
        **repeatable,
    )  # fmt: skip
    return cast(torch.Tensor, out[0] if isinstance(out, tuple) else out)


def _before(window: int | None) -> tuple[int, int]:
    """A window as flash kernels count it: how many tokens before a token it sees, and how many after it."""
    return (-1 if window is None else window - 1, 0)
