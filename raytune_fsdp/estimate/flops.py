"""Floating-point operations of training, and the fraction of a device's peak they amount to (MFU).

Convention, named wherever an MFU is shown: a multiply-add counts two; backward counts twice the forward; matrix
products with weights count 6 x weights a token (the output embedding counts, the input embedding is a lookup and does
not); attention counts the pairs that causal attention inside documents has to compute, not the full square; the work
of activation checkpointing done again does not count. Per device: the work of all devices is divided by all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERA = 1e12

PEAK_FLOPS = {
    # Dense bf16 matrix throughput by a part of the device's name, from the vendors' data sheets. First match wins.
    "B200": 2250 * _TERA,
    "H200": 989 * _TERA,
    "H100 PCIe": 756 * _TERA,
    "H100": 989 * _TERA,
    "A100": 312 * _TERA,
    "A10G": 70 * _TERA,
    "A10": 125 * _TERA,
    "A40": 150 * _TERA,
    "L40S": 362 * _TERA,
    "L4": 121 * _TERA,
    "V100": 125 * _TERA,
    "MI300X": 1307 * _TERA,
}
"""V100 has no bf16: its figure is fp16's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the count needs to know of a network."""

    matmul_weights: int
    """Weights that every token is multiplied with: all matrices but the input embeddings."""
    layers: int
    query_width: int
    """Query heads times head dimension. Grouped key and value heads are smaller as matrices, and are counted there."""


def training_flops(architecture: Architecture, *, tokens: int, attended_pairs: int) -> float:
    """Operations of forward and backward over `tokens` tokens that attend to `attended_pairs` (query, key) pairs."""
    weights = 6.0 * architecture.matmul_weights * tokens
    # Two products (scores, values) of 2 operations a pair and channel, forward once and backward twice.
    attention = 12.0 * architecture.layers * architecture.query_width * attended_pairs
    return weights + attention


def mfu(flops: float, *, seconds: float, devices: int, peak_flops: float) -> float:
    """Fraction of the peak of all `devices` that `flops` in `seconds` amount to."""
    return flops / (seconds * devices * peak_flops)


def peak_flops(device_name: str) -> float | None:
    """Peak of a device by its name, None where it is not known (MFU is not reported then)."""
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", device_name)), None)
