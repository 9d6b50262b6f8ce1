"""Count the floating-point operations of training, and the fraction of the devices' peak that they are (MFU).

The convention, named wherever an MFU is shown: a multiply-add counts as two operations. A product of a weight and a
token takes 2 forward, 2 for the gradient of the weight if it is trained, and 2 for that of its input if anything before
it is trained: 6 in a network that is trained whole, 6 for adapters and 4 for the frozen weights that they adapt, 2
below the first layer that is trained. The output embedding counts for the tokens that are trained on, since no other
needs it; the input embedding is a lookup and does not count. Attention counts the pairs that causal attention inside
documents has to compute, not the full square. The second forward of activation checkpointing does not count. The peak
is that of all devices together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERA = 1e12

PEAK_FLOPS = {
    name: tera * _TERA
    for name, tera in {
        # Dense bf16 matrix throughput with fp32 accumulation, by a part of the device's name, from the vendors' data
        # sheets, which also show twice that for sparse matrices. The first match wins: "H100 PCIe" before "H100".
        "GB300": 2500, "GB200": 2500, "B300": 2250, "B200": 2250,
        "H200 NVL": 835, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989,
        "H20": 148,
        "A100": 312, "A800": 312, "A30": 165, "A40": 150, "A10G": 70, "A10": 125,
        "L40S": 362, "L40": 181, "L20": 119.5, "L4": 121,
        "RTX PRO 6000": 504, "RTX 6000 Ada": 364, "RTX 5000 Ada": 261, "RTX A6000": 155, "RTX A5000": 111,
        # GeForce halves the rate of 16-bit products that are summed in fp32.
        "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 4090": 165, "RTX 4080": 97.5, "RTX 3090 Ti": 80, "RTX 3090": 71,
        "RTX 3080": 59.5,
        "MI355X": 2516, "MI350X": 2307, "MI325X": 1307, "MI300X": 1307,
        "MI250X": 191.5,  # one of its two dies, which are two devices
        "MI210": 181,
        "V100": 125, "T4": 65,
    }.items()
}  # fmt: skip
"""V100 and T4 have no bf16: their figures are fp16's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """How many numbers of weights a token is multiplied with."""

    weights: int
    frozen: int = 0
    """How many of these are not trained."""
    leading: int = 0
    """How many of these have nothing trained before them: their input needs no gradient."""

    @property
    def operations(self) -> float:
        """Operations of forward and backward, for one token."""
        return 6.0 * self.weights - 2.0 * self.frozen - 2.0 * self.leading


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the count needs to know about a network."""

    every_token: Products
    targets: Products
    """Products of the output embedding."""
    layers: int
    leading_layers: int = 0
    """The first layers, if nothing up to their end is trained."""
    query_width: float
    """Query heads times head dimension, the mean over the layers. Fewer (grouped) key and value heads only show in the
    products."""


def training_flops(architecture: Architecture, *, tokens: int, targets: int, attended_pairs: int) -> float:
    """Count the operations of forward and backward over `tokens` tokens, of which `targets` are predicted.

    `attended_pairs`: the (query, key) pairs of attention.
    """
    weights = architecture.every_token.operations * tokens + architecture.targets.operations * targets
    # Two products (scores, values), 2 operations per pair and channel, once forward and twice backward.
    passes = 3 * architecture.layers - 2 * architecture.leading_layers
    return weights + 2 * 2 * passes * architecture.query_width * attended_pairs


def mfu(flops: float, *, seconds: float, devices: int, peak_flops: float) -> float:
    """Return the fraction of the peak of all `devices` that `flops` in `seconds` are."""
    # The peak of all devices: the 45.5 % published for Hugging Face's Llama 2 70B on 16 A100 are 2.84 %, because they
    # divide the work of sixteen devices by the peak of one (docs/design/mfu.md).
    return flops / (seconds * devices * peak_flops)


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by its name; None if it is not known, and MFU then not reported."""
    spaced = device_name.replace("-", " ")  # a plan's "H100-PCIe" is torch's "H100 PCIe", not an "H100"
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", spaced)), None)
