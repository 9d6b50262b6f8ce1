"""What happens in a traced step: where its phases begin, and what the memory in it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from raytune_fsdp.predict.trace.live import Bytes, Kind, Live
from raytune_fsdp.step.gather_fp8 import groups_of
from raytune_fsdp.step.optim import Optimizer


class Recorder:
    """Marks the timeline where passes, blocks and the update begin, and says what is what."""

    def __init__(self, live: Live, model: PreTrainedModel, blocks: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """`blocks`: as they were found before FSDP gave their classes other names."""
        self._live, self._model, self._optimizer = live, model, optimizer
        self._blocks = blocks
        self._pass = -1
        weights = [_local(each) for each in (*model.parameters(), *model.buffers())]
        live.name(weights, "weights")
        live.name((_local(each) for each in optimizer.state_tensors().values()), "optimizer")
        self.persistent = tuple(self._kept(block) for block in self._blocks)
        self.trained = [_trained(block.parameters()) for block in self._blocks]
        self.rest = _trained(model.parameters()) - sum(self.trained)

    def record(self, step: Any) -> None:
        """Follow a step."""
        hooks = [self._model.register_forward_pre_hook(self._begins)]
        for number, block in enumerate(self._blocks):
            hooks.append(block.register_forward_pre_hook(self._marker(number)))
            hooks.append(block.register_forward_hook(self._behind(number)))
        try:
            self._live.follow_gathered(self._model)
            with self._live:
                self._live.mark("start")
                step()
                self._live.mark("end")
        finally:
            for hook in hooks:
                hook.remove()

    def init_state(self) -> None:
        self._optimizer.init_state()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._optimizer.state_tensors()

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self._name_gradients()
        self._live.mark("update")
        self._optimizer.step(lr_factor, found_inf)

    def _begins(self, *_: Any) -> None:
        self._name_gradients()
        self._pass += 1
        self._live.mark(f"pass {self._pass}")

    def _marker(self, number: int) -> Any:
        def begins(*_: Any) -> None:
            self._live.mark(f"forward {self._pass} {number}")

        return begins

    def _behind(self, number: int) -> Any:
        """The end of the last block's forward, and where backward comes to a block."""
        last = number == len(self._blocks) - 1

        def behind(_: nn.Module, __: Any, output: Any) -> None:
            if last:
                self._live.mark(f"head {self._pass}")
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                reached = partial(self._backward, number)
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

        return behind

    def _backward(self, number: int, _: torch.Tensor) -> None:
        self._live.mark(f"backward {self._pass} {number}")

    def _name_gradients(self) -> None:
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        self._live.name((_local(p.grad) for p in parameters), "gradients")
        for group in groups_of(self._model):
            held = [each.unsharded_accumulated_grad for each in group.fsdp_params]
            held.append(group._partial_reduce_output)  # of replicas, until they are summed over all of them
            self._live.name((each for each in held if each is not None), "gradients")

    def _kept(self, block: nn.Module) -> Bytes:
        ids = {id(parameter) for parameter in block.parameters()}
        names = {name for name, parameter in self._model.named_parameters() if id(parameter) in ids}
        weights = sum(_local(parameter).nbytes for parameter in block.parameters())
        state = sum(
            _local(tensor).nbytes
            for key, tensor in self._optimizer.state_tensors().items()
            if any(key.startswith(f"{name}.") for name in names)
        )
        found: dict[Kind, int] = {"weights": weights, "optimizer": state}
        return found


def _trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_local(parameter).nbytes for parameter in parameters if parameter.requires_grad)


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    # Not detached: fake tensors' mode would make a copy of a buffer that has data, and that copy is gone at once.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
