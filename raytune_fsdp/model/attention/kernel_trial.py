"""Try a kernel on a device, forward and backward, before a run relies on it.

An installed package proves little: it may be built for other devices or for another torch, lack what it imports, refuse
the widths or windows of a network, or have no backward for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from raytune_fsdp.base.batch import Borders
from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.model.attention.calls import PREFIX, Call, Kernel, reference
from raytune_fsdp.model.attention.choose import Heads, KernelNeeds
from raytune_fsdp.model.attention.flash import FLASH, is_installed, load
from raytune_fsdp.model.attention.kernels import KERNELS

_LENGTHS = (97, 1, 40, 150)

_WINDOW = 33
"""The largest window that is tried: shorter than two of the documents."""

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
    except Exception as error:  # whatever a package raises; a rank that ends here would leave the others waiting
        return in_one_line(error)
    return None


def _errors(name: str, heads: Heads, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield the relative error of the result and of each gradient against attention by the book."""
    drawn = torch.Generator().manual_seed(0)  # a separate generator: the run's random state does not change
    tokens = sum(_LENGTHS)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn).to(device, dtype)

    tensors = [random(tokens, many, heads.width) for many in (heads.many, heads.keys, heads.keys)]
    tensors += [random(heads.many)] if heads.sinks else []
    weights = random(tokens, heads.many, heads.width)
    starts = torch.tensor([0, *accumulate(_LENGTHS)], dtype=torch.int32, device=device)
    found, right = (
        _values_and_gradients(
            kernel, [each.to(kind).requires_grad_() for each in tensors], weights.to(kind), heads, starts
        )
        for kernel, kind in ((KERNELS[name], dtype), (reference, torch.float32))
    )
    names = ("result", "gradient of queries", "gradient of keys", "gradient of values", "gradient of sinks")
    for what, ours, book in zip(names, found, right, strict=False):
        yield what, float((ours.float() - book).abs().max() / book.abs().max().clamp(min=1e-30))


@torch.enable_grad()
def _values_and_gradients(
    kernel: Kernel, tensors: list[torch.Tensor], weights: torch.Tensor, heads: Heads, starts: torch.Tensor
) -> list[torch.Tensor]:
    q, k, v, *sinks = tensors
    call = Call(
        borders=Borders(starts=starts, longest=max(_LENGTHS)),
        scale=heads.width**-0.5,
        window=None if heads.window is None else min(heads.window, _WINDOW),
        softcap=heads.softcap,
        sinks=sinks[0] if sinks else None,
    )
    out = kernel(q, k, v, call)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]
