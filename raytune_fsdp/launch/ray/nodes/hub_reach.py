"""Check that some node of the cluster can have the weights of a hub model, before a rank is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from raytune_fsdp.base.errors import ModelError, RaytuneError, TransientError
from raytune_fsdp.launch.ray.nodes.checked import ask_each
from raytune_fsdp.launch.ray.resources import Node
from raytune_fsdp.model.directory.hub_download import why_not
from raytune_fsdp.run.fetching import wanted
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs

_SECONDS = 20.0
"""How long to wait for an answer. A node that imports torch from shared storage may take longer; ranks ask again."""
_REASONS = (ModelError, TransientError)


def check_reach(prepared: RunInputs, standing: ResumePoint, nodes: Sequence[Node]) -> None:
    """Refuse weights of the hub that none of these nodes, on which ranks may be, has or can fetch."""
    if standing.checkpoint is not None and not standing.state.base:
        return  # it holds every tensor
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in nodes if node.id != here]
    for hub in wanted(prepared.origin, prepared.adapter):
        reasons = {node.name: why_not(hub) for node in nodes if node.id == here}  # in this process
        if None in reasons.values() or not nodes:
            continue
        answers = ask_each(others, why_not, hub, seconds=_SECONDS) if others else {}
        # A LateError, or what Ray says of a node that was lost, is no answer.
        reasons |= {node.name: each if isinstance(each := answers[node.id], _REASONS) else None for node in others}
        refusing = {name: reason for name, reason in reasons.items() if reason is not None}
        if len(refusing) == len(reasons):
            raise refusal(refusing)


def refusal(reasons: Mapping[str, RaytuneError]) -> RaytuneError:
    """Return the refusal, from each node's reason by its name: no error of the user if all reasons pass with time."""
    lasting = {name: reason for name, reason in reasons.items() if not isinstance(reason, TransientError)}
    name, reason = next(iter((lasting or reasons).items()))
    others = len(reasons) - 1
    more = f" (and {others} more node{'s are' if others > 1 else ' is'} no better off)" if others else ""
    kind = ModelError if lasting else TransientError
    return kind(f"no node that could hold a rank can have the weights: {name}: {reason}{more}")
