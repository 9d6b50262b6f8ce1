"""Try whether an update as one kernel does what its operations do, before a run relies on it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.compile_layers import COMPILED, EAGER, Compiler
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.execution import BY_OPERATION, AsKernel, Execution

_STEPS = 3
_FAR = 1e-3
"""How far apart both may end, as a share of the way that the weights have gone: kernels that round otherwise are off by
a ten-millionth in a step, and bf16 weights then now and then by a digit."""


def choose_update(asked: bool | str, *, kept: str | None, fails: Callable[[], str | None]) -> KernelChoice:
    """Choose how the updates of a run on GPUs run that torch has no kernel for.

    `kept` says how the run's checkpoint was trained; None: there is no checkpoint yet. `fails` returns why they cannot
    be compiled here, or None.
    """
    if asked is False:
        return KernelChoice(name=EAGER, why="as parallel.compile says")
    if kept == EAGER:
        return KernelChoice(name=EAGER, why="as the run began")
    failure = fails()
    if failure is not None:
        return KernelChoice(name=EAGER, why=failure)
    return KernelChoice(name=COMPILED, why="as the run began" if kept else "each weight is read and written once")


def why_update_differs(optim: OptimConfig, device: torch.device, dtype: torch.dtype, *, exact: bool) -> str | None:
    """Return why the updates of a small network are not the same as one kernel and operation by operation, or None.

    `exact`: they must be the same to the bit, so that none depends on how a weight is cut.
    """
    compiler = Compiler("the update of a weight")
    try:
        begun = _network().to(device=device, dtype=dtype)
        ways: tuple[Execution, ...] = (AsKernel(compiler, alone=True), BY_OPERATION)
        compiled, plain = (_updated(begun, optim, each, exact=exact) for each in ways)
    except Exception as error:  # a rank that ends here would leave the others waiting for its answer
        return f"an update as one kernel fails here: {in_one_line(error)}"
    if compiler.failure is not None:
        return compiler.failure
    if exact and not all(torch.equal(compiled[name], plain[name]) for name in plain):
        return "run.exact: an update as one kernel has not the bits of its operations here"
    off = gone = 0.0
    for name, start in begun.state_dict().items():
        off += float((compiled[name].double() - plain[name].double()).square().sum())
        gone += float((plain[name].double() - start.double()).square().sum())
    if not off <= _FAR**2 * gone:
        return f"an update as one kernel is off by {(off / max(gone, 1e-300)) ** 0.5:.1g} of its way here"
    return None


def _network() -> PreTrainedModel:
    """Return a network with matrices whose rows are groups of moments, are not, and are shorter; and with vectors."""
    config = LlamaConfig(
        vocab_size=72, hidden_size=256, intermediate_size=600, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def _updated(
    begun: PreTrainedModel, optim: OptimConfig, execution: Execution, *, exact: bool
) -> dict[str, torch.Tensor]:
    """Return weights and moments after some steps."""
    network = copy.deepcopy(begun)
    optimizer = build_optimizer(network, optim, exact=exact, execution=execution)
    go = torch.zeros((), device=next(network.parameters()).device)
    for step in range(1, _STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        for weight in network.parameters():
            weight.grad = (torch.randn(weight.shape, generator=generator) * 0.01).to(weight)
        optimizer.step(1 / step, go)
    return {**network.state_dict(), **optimizer.state_tensors()}
