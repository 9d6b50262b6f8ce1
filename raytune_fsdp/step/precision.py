"""The types that a run computes in: what a precision means, and the settings of torch for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.network import MASTER_DTYPE
from raytune_fsdp.model.precision.fp8 import check_gpu

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Precisions that compute in another type than the weights have; under fp8, all but the products of linear layers."""


def compute_dtype(precision: str) -> torch.dtype:
    """Return the type of forward and backward: under bf16 and fp16 not that of the weights, which are kept in fp32."""
    return COMPUTE_DTYPE.get(precision, MASTER_DTYPE[precision])


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a GPU without the type: there torch computes bf16 in fp32, slower than fp32, and fp8 not at all."""
    if device.type != "cuda":
        return
    if precision == "fp8":
        check_gpu(device)
    if precision.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"parallel.precision={precision}: {torch.cuda.get_device_name(device)} has no bf16 (Ampere has): "
            "set parallel.precision=fp16 or fp32"
        )


@contextmanager
def numerics(config: ParallelConfig, device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """Set how torch computes products in this context; with `deterministic`, only operations that repeat their bits."""
    check_precision(config.precision, device)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )
    with _repeatable() if deterministic else nullcontext():
        _set_numerics(deterministic or before[0], config.tf32, config.tf32)
        try:
            if deterministic and device.type == "cuda":
                _check_products(device)
            yield
        finally:
            _set_numerics(*before)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Change, in this context, the other settings that torch's deterministic algorithms need."""
    from torch._inductor import config as inductor

    memory: Any = torch.utils.deterministic
    before = os.environ.get(_CUBLAS), inductor.deterministic, memory.fill_uninitialized_memory
    # cuBLAS reads the variable when it is first used; without it torch refuses every product.
    os.environ.setdefault(_CUBLAS, ":4096:8")
    inductor.deterministic = True  # otherwise it chooses kernels by trying which is faster
    memory.fill_uninitialized_memory = False  # filling takes time for nothing
    try:
        yield
    finally:
        if before[0] is None:
            os.environ.pop(_CUBLAS, None)
        _, inductor.deterministic, memory.fill_uninitialized_memory = before


def _check_products(device: torch.device) -> None:
    """Refuse a process that has multiplied on a GPU before: torch looks at cuBLAS's setting at the first product."""
    one = torch.ones(16, 16, device=device)
    try:
        one @ one
    except RuntimeError as error:
        if _CUBLAS not in str(error):
            raise
        raise ConfigError(
            f"run.deterministic (or run.exact): this process has used a GPU before, without {_CUBLAS}=:4096:8, which "
            "is read once: set it in the environment of the process, or train in a new one"
        ) from error


def _set_numerics(deterministic: bool, products: bool, convolutions: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions


@torch.no_grad()
def store_frozen(network: nn.Module, precision: str) -> None:
    """Keep frozen weights in the type that they are computed in: only trained weights need a master's precision."""
    dtype = compute_dtype(precision)
    made: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or parameter.dtype == dtype:
                continue
            if not parameter.is_floating_point():
                continue
            if id(parameter) not in made:  # tied weights stay tied
                made[id(parameter)] = nn.Parameter(parameter.to(dtype), requires_grad=False)
            module._parameters[name] = made[id(parameter)]


def precision_policy(config: ParallelConfig, *, exact: bool = False) -> MixedPrecisionPolicy:
    """Return FSDP's policy: 16-bit compute with fp32 reduction, or everything in the type of the weights.

    `exact`: gradients are sent as they were computed, and whoever receives them adds them (in_order.py).
    """
    compute = COMPUTE_DTYPE.get(config.precision)
    if exact:
        return MixedPrecisionPolicy(param_dtype=compute)
    if compute is None and config.precision != "bf16_pure":
        return MixedPrecisionPolicy()
    # If gradients are summed in two levels, only the second is in fewer bits, which `reduce_by_node` does.
    rounded = config.reduce_dtype == "bf16" and config.reduce == "flat"
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.bfloat16 if rounded else torch.float32)
