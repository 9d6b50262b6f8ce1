"""Dropout that does not depend on how many ranks share a micro-batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Part = tuple[int, int]
"""The number of a part, and how many parts there are."""

WHOLE: Part = (0, 1)


class DropoutInParts(nn.Dropout):
    """Dropout on a part of the tokens (the axis before the last) and of the columns.

    It draws the numbers that a rank with all tokens and columns would draw.
    """

    def __init__(self, p: float, *, tokens: Part = WHOLE, columns: Part = WHOLE) -> None:
        super().__init__(p)
        self.tokens, self.columns = tokens, columns

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        many, width = input.shape[-2:]
        (place, members), (part, parts) = self.tokens, self.columns
        # Not a dropped-out mask of ones times the input: in 16 bits a GPU would round 1 / (1 - p), which it does not
        # round for one rank, and all results would be off by up to 0.2 %, in the same direction.
        sides = (part * width, (parts - 1 - part) * width, place * many, (members - 1 - place) * many)
        whole = F.dropout(F.pad(input, sides), self.p)
        return whole[..., place * many : (place + 1) * many, part * width : (part + 1) * width]
