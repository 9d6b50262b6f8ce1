"""AdamW with torch's fused kernel: moments have the type of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim.adamw import adamw

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.groups import Group
from raytune_fsdp.step.optim.pieces import at, local_gradients


class AdamW:
    """Fused AdamW.

    It works on this rank's pieces as plain tensors. For DTensors, torch finds out for every list of them how the
    operation has to be sharded: 1.0 s in the first step with 147 weights, and 10 ms in every other step (the kernel
    takes 3.5 ms).
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], groups: Sequence[Group], config: OptimConfig, *, exact: bool = False
    ) -> None:
        self._exact = exact
        self._config = config
        self._named = {name: named[name] for group in groups for name in group.names}
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        self.groups = groups

    def init_state(self) -> None:
        for name, parameter in self._named.items():
            if name not in self._state:
                self._state[name] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{moment}": tensor for name in self._named for moment, tensor in self._state.get(name, {}).items()
        }

    @torch.no_grad()
    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self.init_state()
        found_inf = at(next(iter(self._named.values())).device, found_inf)
        for group in self.groups:
            taken = [name for name in group.names if self._named[name].grad is not None]
            # Fused, because only that kernel takes a flag on the device: if the flag is 1, weights, moments and the
            # count of steps stay as they are, and the host never waits for it.
            pieces = [
                [local_piece(self._named[name]) for name in taken],
                local_gradients(self._named[name] for name in taken),
                [local_piece(self._state[name]["exp_avg"]) for name in taken],
                [local_piece(self._state[name]["exp_avg_sq"]) for name in taken],
            ]
            steps = [self._state[name]["step"] for name in taken]
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
                lr=self._config.lr * group.lr_ratio * lr_factor,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                eps=self._config.eps,
                weight_decay=group.weight_decay,
            )
            if ends is not None:
                ends.put_back()
        for parameter in self._named.values():
            parameter.grad = None


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
