"""What training and checkpoints require of an optimizer."""

from __future__ import annotations

from typing import Protocol

import torch


class Optimizer(Protocol):
    """What training and checkpoints require of an optimizer. No method waits for the device."""

    def init_state(self) -> None:
        """Make the state that the first step would make, to load into it or to save it before any step."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of every tensor of the state, by `<parameter>.<moment>`. Call `init_state` first."""

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        """Update the weights from their gradients at this fraction of the peak learning rate, and drop the gradients.

        Where `found_inf` (a number on the device) is 1, weights and state stay as they are, bit for bit.
        """
