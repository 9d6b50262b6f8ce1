"""Which tokens of the vocabulary a rank has, and what it learns of the others' logits: their largest, their sums."""

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
    """How many it has."""
    whole: int
    """How many there are."""

    @property
    def most(self) -> int:
        """How many a rank has at most: the last ones have fewer."""
        return -(-self.whole // self.group.size())

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of tokens among this rank's, 0 for those of others; and which ones are its own."""
        places = ids - self.first
        mine = (places >= 0) & (places < self.rows)
        return torch.where(mine, places, 0), mine

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each token, and whose it is: of several the first, as max() has it on a CPU."""
        best, at = logits.max(-1)
        whole = summed(self.group, best, "max")
        return whole, summed(self.group, torch.where(best == whole, at + self.first, self.whole), "min")

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """All logits, without gradients: of the few tokens that a model is asked about."""
        sent = F.pad(logits.detach(), (0, self.most - self.rows)).contiguous()
        every = [torch.empty_like(sent) for _ in range(self.group.size())]
        dist.all_gather(every, sent, group=self.group)
        return torch.cat(every, -1)[..., : self.whole]
