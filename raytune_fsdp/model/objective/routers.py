"""Watch the routers of a mixture of experts: losses that keep experts balanced, and how many tokens each expert gets.

transformers' models name the modules that return router logits. The sums that are needed are computed where the logits
are made, inside of the layer: as results of the network (`output_router_logits`) the logits of all layers, and what
their softmax keeps for backward, would stay in memory, even with recomputation. A layer that is computed again calls
the hooks again, which must then do the same and note nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import PADDING, MicroBatch
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.sections.train import TrainConfig
from raytune_fsdp.model.objective.losses import Losses

GROUPED, ONE_BY_ONE = "grouped_mm", "eager"
"""All experts in one product, and one after the other, by transformers' names."""


def why_routers_forbid(train: TrainConfig) -> str | None:
    """Return why layers are not to be compiled, or None."""
    asked = train.router_aux_loss_coef or train.router_z_loss_coef
    return "the losses of routers are taken from inside of the layers" if asked else None


_GATES = {"DogeCDMoE": "router_gate"}
"""Whole mixtures that transformers names for their routers' logits, each with the name of its router."""


def routers_of(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the modules that return the routers' logits, in order, each with the index of these in what it returns.

    Return none if they are of several classes (JetMoe's).
    """
    kinds = _kinds(model)
    return [(model.get_submodule(name), *kinds.values()) for name in _named(model, kinds)] if len(kinds) == 1 else []


def names_of_routers(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that choose experts; refuse `method.routers` where transformers names none."""
    named = _named(model, _kinds(model))
    # JetMoe names the router of its attention, and the attention, too.
    named = {name: kind for name, kind in named.items() if not any(each.startswith(f"{name}.") for each in named)}
    found = [f"{name}.{_GATES[kind]}" if kind in _GATES else name for name, kind in named.items()]
    if not found:
        raise ConfigError(
            f"method.routers: transformers names no module of a {type(model).__name__} that chooses experts: leave it "
            "out; method.type=freeze trains what you name, and so does method.modules_to_save along with adapters"
        )
    return found


def _kinds(model: PreTrainedModel) -> dict[type[nn.Module], int]:
    """Return the classes that return the routers' logits, each with the index of these in what it returns."""
    for part in model.modules():
        named = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        recorders = named if isinstance(named, list) else [named]
        kinds = {getattr(each, "target_class", each): int(getattr(each, "index", 0)) for each in recorders}
        if found := {kind: at for kind, at in kinds.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}:
            return found
    return {}


def _named(model: PreTrainedModel, kinds: Collection[type[nn.Module]]) -> dict[str, str]:
    """Return the modules of these classes that compute, with the name of their class.

    PEFT keeps the first values of a module that is trained whole.
    """
    every = model.named_modules() if kinds else ()
    found = {name: type(each).__name__ for name, each in every if isinstance(each, tuple(kinds))}
    return {name: kind for name, kind in found.items() if "original_module" not in name.split(".")}


def numbers_of_experts(model: PreTrainedModel) -> set[int]:
    """Return the numbers of experts that the config has, under any of its names for them."""
    text = model.config.get_text_config()
    found = (getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return {number for number in found if number is not None}


def _experts(model: PreTrainedModel) -> int:
    """Return how many experts each router chooses from; 0 if there are no routers of the usual form, or they differ."""
    routers = [module for module, _ in routers_of(model)]
    if any(type(module).__name__ in _GATES for module in routers):  # Doge's logits are of keys, two for each expert
        return 0
    # A router may have a bias next to its weight, as a matrix of one row.
    matrices = ([p for p in module.parameters() if p.ndim == 2] for module in routers)
    found = {max(each, key=torch.Tensor.numel).shape[0] if each else 0 for each in matrices}
    # A router may have larger matrices than the one that makes its logits, as Zaya's does.
    said = numbers_of_experts(model)
    return found.pop() if len(found) == 1 and (not said or found & said) else 0


def watch_routers(model: PreTrainedModel, train: TrainConfig, group: dist.ProcessGroup | None = None) -> Routers | None:
    """Watch the routers of a network that is not sharded yet; return None if it has none of the usual form.

    `group`: the ranks that share each micro-batch, if several do.
    """
    experts = _experts(model)
    return Routers(model, train, experts, group) if experts else None


def check_routers(model: PreTrainedModel, train: TrainConfig) -> None:
    """Refuse losses of routers that the architecture does not have."""
    for field in ("router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(train, field)
        if not value:
            continue
        # Routers of DeepSeek and its kin are balanced by a bias that no gradient trains, and have no softmax.
        if not hasattr(model.config.get_text_config(), "router_aux_loss_coef"):
            why = "has no load-balancing loss in transformers (its config knows no router_aux_loss_coef)"
        elif not _experts(model):
            why = "has no routers that return one logit for each expert, so such a loss cannot be computed here"
        else:
            continue
        raise ConfigError(f"train.{field}={value:g}: a {type(model).__name__} {why}: leave it out")


class SumOverRanks(torch.autograd.Function):
    """A sum over ranks whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduced(grad, ctx.group), None


def _all_reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = tensor.clone()
    dist.all_reduce(summed, group=group)
    return summed


class Routers:
    """Watches the routers of a network in training."""

    def __init__(
        self, model: PreTrainedModel, train: TrainConfig, experts: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        found = routers_of(model)
        self.experts = experts
        self.layers = len(found)
        self._chosen: int = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0
        self._aux, self._z = train.router_aux_loss_coef, train.router_z_loss_coef
        self._real: torch.Tensor | None = None
        self._noting = False
        self._load: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        for module, index in found:
            module.register_forward_hook(partial(self._seen, index))

    @contextmanager
    def watching(self, batch: MicroBatch) -> Iterator[None]:
        """Note, in this context, a forward pass of the network over this micro-batch."""
        # Kept until the next micro-batch: what is computed again in backward has to do the same.
        self._real = (batch.source_ids != PADDING).reshape(-1)
        self._noting, self._load, self._sums = True, [], []
        try:
            yield
        finally:
            self._noting = False

    def _seen(self, index: int, module: nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        if not module.training or self._real is None:
            return
        if self._noting:
            # Llama 4's router returns only logits and scores.
            whole = [each for each in output if not each.is_floating_point()]
            logits = output[index].detach().reshape(len(self._real), -1)  # nothing is kept for backward
            chosen = whole[0] if whole else logits.topk(self._chosen, -1).indices
            self._load.append(self._count(chosen.reshape(len(self._real), -1)))
        if self._aux or self._z:
            sums = self._summed(output[index].reshape(len(self._real), -1).float())
            if self._noting:
                self._sums.append(sums)

    def _count(self, chosen: torch.Tensor) -> torch.Tensor:
        """Count the tokens that go to each expert. Sums of whole numbers do not depend on the order of adding."""
        assert self._real is not None
        weights = self._real.long().repeat_interleave(chosen.shape[1])
        return torch.zeros(self.experts, dtype=torch.int64, device=chosen.device).scatter_add_(
            0, chosen.reshape(-1).long(), weights
        )

    def _summed(self, logits: torch.Tensor) -> torch.Tensor:
        """Sum over the tokens: choices and probabilities of each expert, and the squares for the z-loss."""
        assert self._real is not None
        probabilities = logits.softmax(-1)
        counts = self._count(probabilities.detach().topk(self._chosen, -1).indices)
        real = self._real.to(logits.dtype)
        return torch.cat([counts.to(logits.dtype), real @ probabilities, (real @ logits.logsumexp(-1).square())[None]])

    def add_to(self, losses: Losses, batch: MicroBatch) -> Losses:
        """Add the routers' losses, times the micro-batch's number of targets, and the load of the experts."""
        losses = replace(losses, load=tuple(self._load))
        if not self._sums:
            return losses
        assert self._real is not None
        sums, real = torch.stack(self._sums).sum(0), self._real.sum()
        if self._group is not None:
            # The loss is that of the whole micro-batch, not a sum of losses of its parts. Each rank adds it for its own
            # targets, and in backward the gradients of all ranks are summed here, too.
            sums = SumOverRanks.apply(sums, self._group)  # type: ignore[no-untyped-call]
            dist.all_reduce(real, group=self._group)
        rows = real.clamp(min=1) * self.layers  # a filler has no token
        means = sums / rows
        counts, probabilities = means[: self.experts], means[self.experts : -1]
        added = self._aux * self.experts * (counts * probabilities).sum() + self._z * means[-1]
        return replace(losses, total=losses.total + (batch.target_tokens * added).to(losses.total.dtype))
