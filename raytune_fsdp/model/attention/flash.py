"""Flash attention on GPUs, from torch and the flash-attn packages, that gets the borders of documents."""

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
"""The module and name of the function that each kernel calls."""


def is_installed(name: str) -> bool:
    """Return whether the package that a kernel calls is installed; not whether it runs."""
    if name == f"{PREFIX}fa3":  # a module of its own, that several distributions have
        return find_spec(_MODULES[name][0]) is not None
    if name not in FLASH:
        return True
    # Versions 2 and 4 are in one package, and version 2 comes with the files of version 4, without what those import.
    try:
        return distribution(FLASH[name]) is not None
    except PackageNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class _Function:
    """A package's function, and the names of its arguments, as not all versions have all."""

    call: Callable[..., Any]
    takes: frozenset[str]


_FUNCTIONS: dict[str, _Function] = {}
"""Functions by kernel. Importing one or reading its signature would split a compiled graph: `load` does both before."""


def load(name: str) -> None:
    """Import the function that a kernel calls."""
    if name in _MODULES:
        module, function = _MODULES[name]
        call = getattr(import_module(module), function)
        _FUNCTIONS[name] = _Function(call, frozenset(inspect.signature(call).parameters))


def _function(name: str) -> _Function:
    if name not in _FUNCTIONS:
        load(name)
    return _FUNCTIONS[name]


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Compute attention over documents with torch's own flash attention."""
    without_softcap(call)
    starts, longest = call.borders.starts, call.borders.longest
    if call.sinks is not None:
        out, _ = _varlen_with_sinks(q, k, v, starts, longest, call.scale, call.window or 0, call.sinks)
        return cast(torch.Tensor, out)
    function = _function(f"{PREFIX}varlen")
    # torch 2.11 groups heads without this flag.
    grouped: dict[str, Any] = {}
    if "enable_gqa" in function.takes and q.shape[1] != k.shape[1]:
        grouped["enable_gqa"] = True
    out = function.call(
        q, k, v, starts, starts, longest, longest, scale=call.scale, window_size=_before(call.window), **grouped
    )
    return cast(torch.Tensor, out)


# varlen_attn returns log-sum-exps, but its backward ignores their gradients, so sinks need an operation of their own.
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
    return with_sinks(out, sums.transpose(0, 1).contiguous(), sinks)  # inductor asserts the strides of the fake


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
    """Call a flash-attn package. All agree on these arguments; the newer ones return a tuple."""
    if call.sinks is not None:  # their backward has no gradient for the sums that they return
        raise Unfit("it has attention sinks")
    function = _function(name)
    starts, longest = call.borders.starts, call.borders.longest
    repeatable: dict[str, Any] = {}
    if "deterministic" in function.takes:  # torch's setting does not reach it
        repeatable["deterministic"] = torch.are_deterministic_algorithms_enabled()
    elif torch.are_deterministic_algorithms_enabled():
        raise Unfit("this version of it has no argument for a backward that repeats its bits")
    out = function.call(
        q, k, v,
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=call.scale, causal=True, window_size=_before(call.window), softcap=call.softcap or 0.0,
        **repeatable,
    )  # fmt: skip
    return cast(torch.Tensor, out[0] if isinstance(out, tuple) else out)


def _before(window: int | None) -> tuple[int, int]:
    """Return a window as flash kernels count it: how many tokens a token sees before it, and how many after it."""
    return (-1 if window is None else window - 1, 0)
