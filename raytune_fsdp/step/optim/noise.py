"""Rounding that is right on average, by noise that is looked up: keyed by seed, parameter, step and place.

Rounded to the nearest, a bf16 weight does not move unless an update is at least 1/512 of it, and a moment with
`beta2=0.999`, which changes by 1/1000, stays where it is. Rounded up as often as the rest is large, both move.
"""

from __future__ import annotations

import torch

from raytune_fsdp.base.random import derive_key

LEVELS = 1 << 16
"""Noise is a whole number in [0, LEVELS): as many bits as bf16 leaves out of fp32."""

_LOW = 0xFFFF


class Noise:
    """The noise of one tensor of a run: by a number's place in the whole tensor, never by the rank."""

    def __init__(self, seed: int, name: str, what: str) -> None:
        key = derive_key("rounding", seed, name, what)
        self._keys = tuple(_signed(key >> shift & 0xFFFFFFFF) for shift in (0, 32))

    def of(self, step: torch.Tensor, first: int, rows: int, columns: int, left: int = 0) -> torch.Tensor:
        """For these rows and columns of the tensor (a matrix of int32), at a step, which is a number on the device."""
        places = torch.arange(first, first + rows, device=step.device, dtype=torch.int32)
        now = _mix(step.to(torch.int32) + self._keys[0])
        lines = _mix(_mix(places + self._keys[1]) ^ now)
        # Hashed as well: added as they are, two rows whose hashes are near would have the same noise, shifted.
        across = _mix(torch.arange(left, left + columns, device=step.device, dtype=torch.int32))
        return (_mix(lines[:, None] ^ across) >> 16).bitwise_and_(_LOW)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """Scramble 32 bits, in place (a bijection: two rounds of shift, xor and multiply, with constants found by search).

    In int32: int64 takes twice the memory, and torch has few operations for unsigned numbers.
    """
    value.bitwise_xor_((value >> 16).bitwise_and_(_LOW))
    value.mul_(0x7FEB352D)
    value.bitwise_xor_((value >> 15).bitwise_and_(0x1FFFF))
    value.mul_(_signed(0x846CA68B))
    return value.bitwise_xor_((value >> 16).bitwise_and_(_LOW))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def to_bf16(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of its two neighbours in bf16: the nearer one the likelier."""
    # bf16 is the upper half of fp32. Infinities have nothing in the lower half, and stay.
    bits = value.contiguous().view(torch.int32) + noise
    return bits.bitwise_and_(~_LOW).view(torch.float32).bfloat16()
