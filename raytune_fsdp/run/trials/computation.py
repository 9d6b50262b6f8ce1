"""Refuse, at every start, a network that does not compute what it should, as model/proof.py measures it.

All ranks must call these together: a sharded model needs every rank for a forward pass.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.model.attention.choose import SIXTEEN_BITS, logits_of
from raytune_fsdp.model.network import class_name
from raytune_fsdp.model.proof import documents, error_of_kernel, error_of_loss, error_of_parts, leak_between_documents
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.model.split.sequence import split_tokens
from raytune_fsdp.step.parallel import evaluating

# These bounds separate rounding, far below, from the effect of another document's tokens, far above. The same products
# next to other tokens give the same bits, but experts in 16 bits get batches of other sizes.
_LEAK, _LEAK_OF_EXPERTS = 1e-5, 2e-2

_ERROR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""A kernel's largest error, relative to its largest value. A kernel that leaks, or ignores a window, is off by 1."""


def check_computation(model: PreTrainedModel, packing: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse an attention or a loss that computes something else, and packing where one document sees another.

    Collective. `dtype` is what the network computes in, which may not be the type of its weights.
    """
    with evaluating(model):
        mine = (
            error_of_kernel(model, device),
            leak_between_documents(model, device) if packing != "none" else 0.0,
            error_of_loss(model, device),
        )
    # All ranks judge the same values, the largest on any rank, so if one refuses all do. A NaN is the worst: max() of a
    # tensor returns it, and no bound holds for it.
    error, change, loss = torch.tensor(on_all_ranks(lambda: mine), dtype=torch.float64).amax(0).tolist()
    if not error <= _ERROR[dtype]:
        found = "are not finite" if math.isnan(error) else f"are off by up to {error:.1e} from attention by the book"
        raise ModelError(
            f"model.attention: {model.config._attn_implementation} is wrong here: its results {found} in "
            f"{str(dtype)[6:]}; set model.attention=eager"
        )
    if math.isnan(change) or math.isnan(loss):
        raise ModelError(
            f"parallel.precision: the logits of {class_name(model)} are not finite in {str(dtype)[6:]}; choose another "
            "precision, or correct the weights"
        )
    experts = dtype in SIXTEEN_BITS and model._can_set_experts_implementation()
    if change > (_LEAK_OF_EXPERTS if experts else _LEAK):
        raise _leaks(model, packing, change)
    if loss > _ERROR[dtype] and head_of(model) is not None:
        raise ModelError(
            f"model.head: the scores of {class_name(model)} at the last tokens of documents are off by {loss:.1e} "
            "from those of all its tokens; choose another model"
        )
    if loss > _ERROR[dtype]:
        raise ModelError(
            f"model.loss: losses are off by up to {loss:.1e} from those of the network's own logits; "
            "set model.loss=plain"
        )


def check_split_tokens(
    model: PreTrainedModel, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> None:
    """Make the network compute parts of micro-batches, and refuse one that then computes something else. Collective."""
    with evaluating(model):
        batch = documents(model, device)
        whole = logits_of(model, batch.input_ids, batch.position_ids, batch.borders).flatten(0, 1)
        split_tokens(model, group)
        mine = error_of_parts(model, group, whole, device)
    error = max(on_all_ranks(lambda: mine))
    if not error <= _ERROR[dtype]:
        raise ModelError(
            f"parallel.mesh.sequence={group.size()}: a {class_name(model)} computes something else for a part of the "
            f"tokens than for all of them (logits are off by {error:.1e}); set parallel.mesh.sequence=1"
        )


def refuse_leak(model: PreTrainedModel, packing: str, change: float) -> None:
    """Raise if the logits of a document change by more than rounding when the one before it does."""
    if change > _LEAK:
        raise _leaks(model, packing, change)


def _leaks(model: PreTrainedModel, packing: str, change: float) -> ConfigError:
    return ConfigError(
        f"data.packing={packing}: in {class_name(model)} with {model.config._attn_implementation} attention, "
        f"packed documents see each other (logits change by {change:.1e}); set data.packing=none"
    )
