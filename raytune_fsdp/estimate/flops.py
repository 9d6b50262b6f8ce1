"""Floating-point operations of training, and the fraction of a device's peak they amount to (MFU).

The convention, named wherever an MFU is shown: a multiply-add counts as two operations, and backward as twice the
forward. Products with weights count 6 operations per weight and token; the output embedding counts, the input embedding
is a lookup and does not. Attention counts the pairs that causal attention inside documents has to compute, not the full
square. The second forward of activation checkpointing does not count. The peak is that of all devices together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERA = 1e12

PEAK_FLOPS = {
    # Dense bf16 matrix throughput by a part of the device's name, from the vendors' data sheets, which also show twice
    # that for sparse matrices. The first match wins, so "H100 PCIe" comes before "H100".
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
    query_width: float
    """Query heads times head dimension, the mean over the layers. That grouped key and value heads are fewer only shows
    in `matmul_weights`."""


def training_flops(architecture: Architecture, *, tokens: int, attended_pairs: int) -> float:
    """Operations of forward and backward over `tokens` tokens that attend to `attended_pairs` (query, key) pairs."""
    weights = 6.0 * architecture.matmul_weights * tokens
    # Two products (scores, values), 2 operations per pair and channel, once forward and twice backward: 2 x 2 x 3.
    attention = 12.0 * architecture.layers * architecture.query_width * attended_pairs
    return weights + attention


def mfu(flops: float, *, seconds: float, devices: int, peak_flops: float) -> float:
    """Fraction of the peak of all `devices` that `flops` in `seconds` amount to."""
    # Of all devices: the 45.5 % published for Hugging Face's Llama 2 70B on 16 A100 are 2.84 %, because they divide the
    # work of sixteen devices by the peak of one (docs/architecture.md).
    return flops / (seconds * devices * peak_flops)


def peak_flops(device_name: str) -> float | None:
    """The peak of a device by its name; None if it is not known, and MFU then not reported."""
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", device_name)), None)
