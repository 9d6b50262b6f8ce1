"""Prove at a start that ranks which compute layers together compute what one alone does, forward and backward.

No rank has the whole of a large network to compare with. So a small one of the same config is computed by every rank
alone, and by all of them together.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.collectives import why_on_any_rank
from raytune_fsdp.base.errors import ConfigError, in_one_line
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.model.network import class_name
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.pieces.pieces import cut_piece
from raytune_fsdp.model.proof import documents
from raytune_fsdp.model.split.tensor import split_layers
from raytune_fsdp.run.trials.probe import small_network
from raytune_fsdp.step.precision import numerics

logger = logging.getLogger(__name__)

_BOUND = 1e-4
"""Relative to the largest gradient of a weight. Other orders of sums are 1e-6 apart in fp32; errors are off by 1."""


def try_split(
    config: FinetuneConfig,
    hf_config: PretrainedConfig,
    network: PreTrainedModel,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Refuse a network that computes something else when its layers are cut. Collective.

    `network` is that network, on the meta device. `mesh`: the ranks that have each a part of every layer.
    """
    try:
        whole = small_network(config, hf_config, network)
    except Exception as error:  # sizes that cannot be divided: the same on every rank
        logger.debug("no small network could be built: %s", in_one_line(error))
        return
    with numerics(ParallelConfig(precision="fp32"), device, deterministic=False):  # tf32 alone is off by 1e-4
        problem = why_on_any_rank(lambda: difference_when_cut(whole, mesh, device))
    if problem is not None:
        raise ConfigError(
            f"parallel.mesh.tensor={mesh.size()}: a {class_name(network)} computes something else when its layers are "
            f"cut ({problem}); set parallel.mesh.tensor=1"
        )


def difference_when_cut(whole: PreTrainedModel, mesh: DeviceMesh, device: torch.device) -> str | None:
    """Return how a small network's losses, or a gradient, differ when its layers are cut; None: by rounding.
    Collective."""
    install_chunked_loss(whole)
    whole.to(device)
    together = copy.deepcopy(whole)
    try:
        split_layers(together, mesh)
        loss, gradients = _computed(whole, device)
        found, others = _computed(together, device)
    except Exception as error:  # the code of any model
        return in_one_line(error)
    if not abs(found - loss) <= _BOUND * abs(loss):
        return f"its loss is {found:.6g} instead of {loss:.6g}"
    for name, gradient in others.items():
        right = cut_piece(gradients[name], gradient, mesh)
        mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        off = float((mine - right).abs().max() / gradients[name].abs().max().clamp(min=1e-6))
        if not off <= _BOUND:
            return f"the gradient of {name} is off by {off:.1e}"
    return None


def _computed(model: PreTrainedModel, device: torch.device) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of documents, and its gradients. All calls draw the same dropout."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        loss = micro_batch_loss(model.train(), documents(model, device)).total
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
