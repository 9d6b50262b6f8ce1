"""Try a kernel on a device, forward and backward, before a run relies on it.

An installed package proves little: it may be built for other devices or for another torch, lack what it imports, refuse
the widths or windows of a network, or have no backward for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from raytune_fsdp.base.batch import Borders
from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.model.attention.calls import PREFIX, Call, Kernel, reference
from raytune_fsdp.model.attention.choose import Heads, KernelNeeds
from raytune_fsdp.model.attention.flash import FLASH, is_installed, load
from raytune_fsdp.model.attention.kernels import KERNELS

_LENGTHS = (97, 1, 40, 150)

_LONGER = (400, 1, 40, 600)
"""Documents with which bits are asked for twice: three parts of a sum are needed to be added in another order."""

_BOUND = 4e-2
"""Largest error in 16 bits, relative to the largest value. With a wrong document or window, a gradient is off by 1."""

_MAJORS = {f"{PREFIX}fa3": (8, 9)}
"""Major capabilities of the devices that a kernel is for, if it would end the process on others instead of raising."""


def why_kernel_fails(name: str, needs: KernelNeeds, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel does not do what a network needs on this device, or None."""
    if not is_installed(name):
        return f"{FLASH[name]} is not installed"
    try:
        major, minor = torch.cuda.get_device_capability(device)
        if major not in _MAJORS.get(name, (major,)):
            return f"it is not for devices of capability {major}.{minor}"
        load(name)
        for heads in needs.heads or (Heads(many=8, keys=2, width=needs.width),):
            for what, error in _errors(name, heads, device, dtype):
                if not error <= _BOUND:  # written so that NaN fails, too
                    return f"its {what} is off by {error:.1e} from attention by the book"
            if torch.are_deterministic_algorithms_enabled() and (which := _changing(name, heads, device, dtype)):
                return f"its {which} has other bits the second time, and run.deterministic or run.exact is set"
    except Exception as error:  # whatever a package raises; a rank that ends here would leave the others waiting
        return in_one_line(error)
    return None


_NAMES = ("result", "gradient of queries", "gradient of keys", "gradient of values", "gradient of sinks")


def _errors(name: str, heads: Heads, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield the relative error of the result and of each gradient against attention by the book."""
    found = _values_and_gradients(KERNELS[name], heads, _LENGTHS, device, dtype)
    right = _values_and_gradients(reference, heads, _LENGTHS, device, dtype, torch.float32)
    for what, ours, book in zip(_NAMES, found, right, strict=False):
        yield what, float((ours.float() - book).abs().max() / book.abs().max().clamp(min=1e-30))


def _changing(name: str, heads: Heads, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what has other bits when it is computed again, or None."""
    first, second = (_values_and_gradients(KERNELS[name], heads, _LONGER, device, dtype) for _ in range(2))
    changes = (what for what, one, other in zip(_NAMES, first, second, strict=False) if not torch.equal(one, other))
    return next(changes, None)


@torch.enable_grad()
def _values_and_gradients(
    kernel: Kernel,
    heads: Heads,
    lengths: Sequence[int],
    device: torch.device,
    drawn: torch.dtype,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return result and gradients for values that are always the same, of the type `drawn`, computed in `dtype`."""
    generator = torch.Generator().manual_seed(0)  # a separate one: the run's random state does not change

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, drawn).to(dtype or drawn)

    tokens = sum(lengths)
    tensors = [random(tokens, many, heads.width).requires_grad_() for many in (heads.many, heads.keys, heads.keys)]
    tensors += [random(heads.many).requires_grad_()] if heads.sinks else []
    weights = random(tokens, heads.many, heads.width)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    q, k, v, *sinks = tensors
    call = Call(
        borders=Borders(starts=starts, longest=max(lengths)),
        scale=heads.width**-0.5,
        window=None if heads.window is None else min(heads.window, max(lengths) // 4),  # shorter than two of them
        softcap=heads.softcap,
        sinks=sinks[0] if sinks else None,
    )
    out = kernel(q, k, v, call)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]
