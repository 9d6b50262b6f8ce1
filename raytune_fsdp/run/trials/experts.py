"""Try one product for all experts on a device, forward and backward, before a run relies on it.

transformers takes torch's grouped product wherever there is one. Whether its kernel takes a network's shapes, with an
expert that gets no token, and whether it has a backward for them, only the device can say.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.objective.routers import GROUPED, ONE_BY_ONE

logger = logging.getLogger(__name__)

_EXPERTS, _TOKENS, _EACH = 3, 97, 2
"""The experts that are tried, the tokens, and the experts of each token. The last expert gets no token. No more, since
one of a large network takes gigabytes."""

_BOUND = {torch.float16: 4e-2, torch.bfloat16: 4e-2}
_OTHER_BOUND = 1e-2
"""Largest error relative to the largest value, in 16 bits and otherwise, where products may be in tf32. With a token at
another expert, it is 1."""


def choose_experts(model: PreTrainedModel, *, kept: str | None, fails: Callable[[], str | None]) -> KernelChoice | None:
    """Choose how a network's experts are multiplied with, and set it; None: there is no choice.

    `kept`: how its checkpoint was trained; None: there is no checkpoint. `fails` returns why the grouped product is not
    to be relied on, or None; all ranks alike call it.
    """
    if not any(_experts_in(model)) or model.config._experts_implementation != GROUPED:
        return None
    why = "as the run began" if kept else "one product for all"
    if kept == ONE_BY_ONE or (failure := fails()) is not None:
        model.set_experts_implementation(ONE_BY_ONE)
        return KernelChoice(name=ONE_BY_ONE, why=why if kept == ONE_BY_ONE else f"{GROUPED}: {failure}")
    return KernelChoice(name=GROUPED, why=why)


def why_experts_fail(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the grouped products of a network's experts are not what each expert computes, or None.

    One module of each class and shape is tried, with fewer experts, and without the compiler, which in other types than
    bf16 takes another operation. `model` is on the meta device. What cannot be tried is relied on.
    """
    kinds = {(type(each), tuple(p.shape for p in each.parameters(recurse=False))): each for each in _experts_in(model)}
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            for each in kinds.values():
                if (few := _few(each, device)) is None:
                    continue
                for what, error in _errors(*few, device, dtype):
                    if not error <= _BOUND.get(dtype, _OTHER_BOUND):  # written so that NaN fails, too
                        return f"its {what} is off by {error:.1e} from that of one expert after the other"
    except torch.OutOfMemoryError as error:
        logger.warning("experts' grouped products were not tried: %s", in_one_line(error))
    except Exception as error:  # whatever a kernel raises; a rank that ends here would leave the others waiting
        return in_one_line(error)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what was taken for it is the run's again
    return None


def _experts_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that transformers lets multiply in more than one way."""
    return (module for module in model.modules() if hasattr(module, "_is_expert_parallel"))


def _few(module: nn.Module, device: torch.device) -> tuple[Any, int] | None:
    """Return such a module with a few experts, and the width of its input; None if it is of another build."""
    torch.manual_seed(0)
    few: Any = copy.deepcopy(module)
    try:
        few.num_experts = min(few.num_experts, _EXPERTS)
        first = next(few.parameters(recurse=False))
        width = first.shape[1] if few.is_transposed else first.shape[2]
    except (AttributeError, IndexError, StopIteration) as error:
        logger.warning("experts' grouped products were not tried: %s", in_one_line(error))
        return None
    for name, weight in few.named_parameters():
        owner, _, own = name.rpartition(".")
        shape = weight.shape if owner else (few.num_experts, *weight.shape[1:])
        drawn = torch.randn(shape, device=device) / max(1, shape[-1]) ** 0.5
        few.get_submodule(owner)._parameters[own] = nn.Parameter(drawn)
    few.config = copy.deepcopy(few.config)
    return few, int(width)


def _errors(few: Any, width: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield the relative error of the result and of each gradient."""
    states, weights = (torch.randn(_TOKENS, width, device=device) for _ in range(2))
    chosen = torch.randint(max(1, few.num_experts - 1), (_TOKENS, min(_EACH, few.num_experts)), device=device)
    shares = torch.rand(chosen.shape, device=device)
    grouped, apart = (
        _values_and_gradients(few.to(kind), way, states.to(kind), weights.to(kind), chosen, shares.to(kind))
        for way, kind in ((GROUPED, dtype), (ONE_BY_ONE, torch.float32))
    )
    for what, ours in grouped.items():
        yield what, float((ours.float() - apart[what]).abs().max() / apart[what].abs().max().clamp(min=1e-30))


def _values_and_gradients(
    module: Any, way: str, states: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> dict[str, torch.Tensor]:
    module.config._experts_implementation = way
    states = states.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = module(states, chosen, shares)
    (out * weights).sum().backward()
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert states.grad is not None
    return {"result": out.detach(), "gradient of its input": states.grad, **gradients}
