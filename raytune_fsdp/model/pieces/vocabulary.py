"""The tokens of the vocabulary that a rank has, and what it gets of the others' logits: the largest, sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from raytune_fsdp.model.pieces.sums import summed


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    group: dist.ProcessGroup
    first: int
    """The first of this rank's tokens."""
    rows: int
    """How many tokens this rank has."""
    whole: int
    """How many tokens the vocabulary has."""

    @property
    def most(self) -> int:
        """The most tokens that a rank has: the last ranks have fewer."""
        return -(-self.whole // self.group.size())

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of tokens among this rank's, 0 for other ranks' tokens, and which tokens are its own."""
        places = ids - self.first
        mine = (places >= 0) & (places < self.rows)
        return torch.where(mine, places, 0), mine

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's largest logit over all ranks, and its id: the first of several, as max() on a CPU."""
        best, at = logits.max(-1)
        whole = summed(self.group, best, "max")
        return whole, summed(self.group, torch.where(best == whole, at + self.first, self.whole), "min")

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather all logits, without gradients, for the few tokens that a model is asked about."""
        return self.of_all(F.pad(logits.detach(), (0, self.most - self.rows)))[..., : self.whole]

    def of_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, which have the same shape, side by side."""
        sent = tensor.contiguous()
        every = [torch.empty_like(sent) for _ in range(self.group.size())]
        dist.all_gather(every, sent, group=self.group)
        return torch.cat(every, -1)
