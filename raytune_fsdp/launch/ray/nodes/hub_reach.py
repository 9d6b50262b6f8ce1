"""Whether any node of the cluster can have the weights of a hub model: asked before a rank is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.launch.ray.nodes.checked import ask_each
from raytune_fsdp.launch.ray.resources import Node
from raytune_fsdp.model.directory.hub_download import why_not
from raytune_fsdp.model.directory.hub_weights import HubWeights
from raytune_fsdp.run.fetching import wanted
from raytune_fsdp.run.standing import ResumePoint, RunInputs

_SECONDS = 20.0
"""For an answer. A node that has to import torch from shared storage first may take longer; ranks ask again."""


def check_reach(prepared: RunInputs, standing: ResumePoint, nodes: Sequence[Node]) -> None:
    """Refuse weights of the hub that none of these nodes, on which ranks may be, has or can fetch."""
    if standing.checkpoint is not None and not standing.state.base:
        return  # it holds every tensor
    for hub in wanted(prepared.origin, prepared.adapter):
        _check(hub, nodes)


def _check(hub: HubWeights, nodes: Sequence[Node]) -> None:
    here = ray.get_runtime_context().get_node_id()
    reasons = {node.name: why_not(hub) for node in nodes if node.id == here}  # without a process of its own
    others = [node for node in nodes if node.id != here]
    if None in reasons.values() or not nodes:
        return
    answers = ask_each(others, why_not, hub, seconds=_SECONDS) if others else {}
    # An exception is no answer.
    reasons |= {node.name: each if isinstance(each := answers[node.id], str) else None for node in others}
    if None not in reasons.values():
        name, reason = next(iter(reasons.items()))
        more = f" (and {len(reasons) - 1} more nodes are no better off)" if len(reasons) > 1 else ""
        raise ModelError(f"no node that could hold a rank can have the weights: {name}: {reason}{more}")
