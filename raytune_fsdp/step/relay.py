"""Bring gradients in the order of micro-batches through several nodes: `parallel.reduce: hierarchical` in an exact run.

If every rank sent its gradients straight to the owners, L ranks of a node would each send (G-1)/G of them to the other
G-1 nodes. Here rank r of each node gets from its own node's ranks what belongs to the ranks r of all nodes. One node
adds its micro-batches and passes the sum on, as micro-batches follow each other over the nodes; the last one sends the
owners their rows. Between nodes a rank sends about one L-th of the gradients, in the type of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raytune_fsdp.base.collectives import make_device_mesh

_PIECE = 4 << 20
"""Numbers that are passed on at once, so that a node adds while the one before it still does."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Two groups of a rank: the ranks of its node, and the ranks of the same number on all nodes."""

    inside: dist.ProcessGroup
    between: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh, per_node: int) -> Levels:
        """Make them. Collective. `per_node`: how many ranks that share a copy of the model are on each node."""
        shards = mesh["shard"].size()
        axes = {"replicate": mesh.size() // shards, "between": shards // per_node, "inside": per_node}
        levels = make_device_mesh(mesh.device_type, axes)
        return cls(levels.get_group("inside"), levels.get_group("between"))

    def by_rail(self, parts: torch.Tensor) -> torch.Tensor:
        """Return parts for all ranks in the order of rails: n * ranks + r, which is rank r's of node n, at (r, n)."""
        return parts.view(self.between.size(), self.inside.size(), -1).transpose(0, 1).contiguous()


def add_in_turns(
    output: torch.Tensor, gradients: torch.Tensor, owners: Sequence[int], levels: Levels, *, begun: bool
) -> None:
    """Add the gradients of the ranks in the order of `owners` to this rank's rows in `output`. Collective.

    `gradients`: this rank's, for all ranks. `begun`: whether `output` has a sum already.
    """
    inside, between = levels.inside, levels.between
    sent = levels.by_rail(gradients)
    given = torch.empty_like(sent)
    dist.all_to_all_single(given.view(-1), sent.view(-1), group=inside)
    given = given.view(inside.size(), -1)
    turns = [(node, [*ranks]) for node, ranks in groupby(owners, key=lambda rank: rank // inside.size())]
    rows = output.new_empty(between.size(), output.numel())
    first, last, here = turns[0][0], turns[-1][0], between.rank()
    if begun:
        dist.gather(output, [*rows] if here == first else None, group=between, group_dst=first)
    total = rows.view(-1)
    # A node whose turn comes twice has to have passed on everything before it gets it back.
    piece = max(1, len(total)) if first == last and len(turns) > 1 else _PIECE
    for start in range(0, len(total), piece):
        some = total[start : start + piece]
        for turn, (node, ranks) in enumerate(turns):
            if node != here:
                continue
            if turn:
                dist.recv(some, group=between, group_src=turns[turn - 1][0])
            for rank in ranks:
                part = given[rank % inside.size(), start : start + piece]
                if begun or turn or rank != ranks[0]:
                    some.add_(part)
                else:
                    some.copy_(part)
            if turn + 1 < len(turns):
                dist.send(some, group=between, group_dst=turns[turn + 1][0])
    dist.scatter(output, [*rows] if here == last else None, group=between, group_src=last)
