"""AdamW with torch's fused kernel: moments have the type of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim.adamw import adamw

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.pieces import local_gradients
from raytune_fsdp.step.optim.update import Trained, Updates


class AdamW(Updates):
    """Fused AdamW. Its step is its own: the kernel takes `found_inf`.

    It works on this rank's pieces as plain tensors. For DTensors, torch finds out for every list of them how the
    operation has to be sharded: 1.0 s in the first step with 147 weights, and 10 ms in every other step (the kernel
    takes 3.5 ms).
    """

    def __init__(self, weights: Trained, config: OptimConfig, *, exact: bool = False) -> None:
        super().__init__(weights)
        self._exact = exact
        self._config = config

    def _moments(self, name: str, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self.init_state()
        named, state = self._trained.named, self._trained.state
        found_inf = self._trained.to_weights(found_inf)
        for group in self.groups:
            taken = [name for name in group.names if named[name].grad is not None]
            # Fused, because only that kernel takes a flag on the device: if the flag is 1, weights, moments and the
            # count of steps stay as they are, and the host never waits for it.
            pieces = [
                [local_piece(named[name]) for name in taken],
                local_gradients(named[name] for name in taken),
                [local_piece(state[name]["exp_avg"]) for name in taken],
                [local_piece(state[name]["exp_avg_sq"]) for name in taken],
            ]
            steps = [state[name]["step"] for name in taken]
            ends = _Ends(pieces, steps) if self._exact else None
            weights, gradients, means, squares = pieces if ends is None else ends.pieces
            adamw(
                weights,
                gradients,
                means,
                squares,
                [],
                steps if ends is None else ends.steps,
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                maximize=False,
                lr=self._trained.rate(group, lr_factor),
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                eps=self._config.eps,
                weight_decay=group.weight_decay,
            )
            if ends is not None:
                ends.put_back()
        self._trained.drop_gradients()


_LANES = 64
"""A CPU's kernel takes up to so many numbers at a time; the last ones, if there are fewer, it rounds otherwise."""


class _Ends:
    """The pieces of tensors, cut so that the kernel computes every number alike, wherever a rank's piece ends."""

    def __init__(self, pieces: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor]) -> None:
        self.pieces: list[list[torch.Tensor]] = [[] for _ in pieces]
        self.steps: list[torch.Tensor] = []
        self._padded: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The last numbers of a piece, and the buffer that is computed for them."""
        for step, *each in zip(steps, *pieces, strict=True):
            flat = [piece.view(-1) for piece in each]
            whole = len(flat[0]) // _LANES * _LANES
            for taken, piece in zip(self.pieces, flat, strict=True):
                taken.append(piece[:whole])
            self.steps.append(step)
            if whole == len(flat[0]):
                continue
            for taken, piece in zip(self.pieces, flat, strict=True):
                end = piece[whole:]
                padded = end.new_zeros(_LANES)
                padded[: len(end)] = end
                taken.append(padded)
                self._padded.append((end, padded))
            self.steps.append(step.clone())  # the kernel counts the update for each piece

    def put_back(self) -> None:
        for end, padded in self._padded:
            end.copy_(padded[: len(end)])
