"""What travels by the book: traffic is held against it."""

from __future__ import annotations


def summed_by_layers(*, tokens: int, width: int, layers: int, members: int, recomputed: int = 0) -> float:
    """Return how many numbers a rank receives for layers that are cut, for a micro-batch of `tokens` tokens.

    The results of attention and of the MLP are added up in forward, the gradients of their inputs in backward, and
    `recomputed` results again in a layer that is computed again. What is added up is sent there and back.
    """
    return layers * (4 + recomputed) * tokens * width * 2 * (members - 1) / members
