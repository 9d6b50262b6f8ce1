"""Have several ranks share a micro-batch, each with a part of the tokens (`parallel.mesh.sequence`).

Everything but attention looks at one token at a time. Around attention ranks exchange tokens for heads: each then has
all tokens of some heads, computes these as any rank would, borders included, and returns the results
(DeepSpeed-Ulysses, arXiv:2309.14509). Random numbers for tokens are drawn for the whole micro-batch and cut, so that
they do not depend on how many ranks share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from transformers import AttentionInterface, PreTrainedModel

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.model.attention.calls import Call, Kernel, attend
from raytune_fsdp.model.attention.choose import Heads, KernelChoice, KernelNeeds
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.model.split.dropout import WHOLE, DropoutInParts

_IN_PARTS = "_in_parts_"
"""Between a kernel's name and a group's, for the same kernel over the ranks of the group."""


def check_attention_in_parts(sequence: int, chosen: KernelChoice) -> None:
    """Refuse an attention that sees only the tokens of its own rank."""
    if chosen.name not in KERNELS:
        raise ConfigError(
            f"parallel.mesh.sequence={sequence}: only attention that takes document borders can be shared by "
            f"ranks, and this run has transformers' {chosen.name} ({chosen.why}); set parallel.mesh.sequence=1"
        )


def check_sequence(sequence: int, needs: KernelNeeds, *, sharing: int = 1) -> None:
    """Refuse, before a rank is started, what is known to fail on every device. `sharing`: ranks that already share
    heads."""
    if sequence == 1:
        return
    if needs.unshared:
        raise ConfigError(f"parallel.mesh.sequence={sequence}: {needs.unshared}, or parallel.mesh.sequence=1")
    if needs.mixers:
        raise ConfigError(
            f"parallel.mesh.sequence={sequence}: its state mixers ({', '.join(needs.mixers)}) need all tokens of a "
            "document, and ranks that share samples see parts of documents; set parallel.mesh.sequence=1"
        )
    if needs.refused:
        check_attention_in_parts(sequence, KernelChoice(name="attention", why=needs.refused))
    if needs.heads:
        _check_heads(sequence, needs.heads, sharing)


def _check_heads(sequence: int, heads: Iterable[Heads], sharing: int) -> None:
    """Refuse a number of ranks that cannot share the heads of some layer."""
    most = math.gcd(*(each.many for each in heads)) // sharing
    if most % sequence:
        valid = [size for size in range(1, most + 1) if most % size == 0]
        raise ConfigError(
            f"parallel.mesh.sequence={sequence}: each rank computes the attention of as many heads, and {sequence} "
            f"does not divide {most}; valid: {valid}"
        )


def split_tokens(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Make the network compute a part of each micro-batch.

    Its attention then runs over the ranks of the group, and its dropout draws as for the whole micro-batch.
    """
    name, members = model.config._attn_implementation, group.size()
    if _IN_PARTS not in name:
        # With the group's name: transformers keeps one function by name, and another network has another group.
        kernel, name = KERNELS[name], f"{name}{_IN_PARTS}{group.group_name}"
        AttentionInterface.register(name, partial(attend, partial(_over_heads, kernel, group)))
        model.set_attn_implementation(name)
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if type(child) in (nn.Dropout, DropoutInParts):
                columns = child.columns if isinstance(child, DropoutInParts) else WHOLE
                part = DropoutInParts(child.p, tokens=(group.rank(), members), columns=columns)
                setattr(parent, key, part.train(child.training))


def heads_of_keys(many: int, keys: int, members: int) -> int:
    """Return as how many heads keys and values are sent: if members do not divide them, some go to several members."""
    repeated = math.lcm(keys, members)
    assert many % repeated == 0, (many, keys, members)
    return repeated


def _over_heads(
    kernel: Kernel, group: dist.ProcessGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> torch.Tensor:
    """Compute attention for this rank's tokens, given their queries (tokens, heads, width), keys and values."""
    members, (tokens, many, width) = group.size(), q.shape
    times = heads_of_keys(many, k.shape[1], members) // k.shape[1]
    if times > 1:
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    # Every member gets its heads of all three in one message.
    sent = torch.cat([each.view(tokens, members, -1, width) for each in (q, k, v)], dim=2).transpose(0, 1)
    mine = _exchange(sent, group).view(tokens * members, -1, width)
    own, own_keys = many // members, k.shape[1] // members
    if call.sinks is not None:
        call = replace(call, sinks=call.sinks.view(members, own)[group.rank()])
    out = kernel(mine[:, :own], mine[:, own : own + own_keys], mine[:, own + own_keys :], call)
    back = _exchange(out.reshape(members, tokens, own, width), group)
    return back.transpose(0, 1).reshape(tokens, many, width)


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange along the first axis: it is the receiving member before, and the sending member afterwards."""
    received: torch.Tensor = _Exchange.apply(tensor, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """An exchange that waits for its result. The tensor that torch's own returns waits only once an operation of torch
    reads it, and flash-attn 4 reads the memory itself."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    found: torch.Tensor = wait_tensor(all_to_all_single(tensor.contiguous(), None, None, group))  # type: ignore[no-untyped-call]
    return found
