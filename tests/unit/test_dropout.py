"""Dropout in parts has the numbers of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytune_fsdp.model.split.dropout import DropoutInParts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_are_those_of_the_whole_to_the_bit(dtype: torch.dtype) -> None:
    whole = torch.randn(2, 6, 8, dtype=dtype, requires_grad=True)
    torch.manual_seed(5)
    right = nn.Dropout(0.3)(whole)
    (slopes,) = torch.autograd.grad(right.sum(), whole)
    for place in range(3):
        for part in range(2):
            mine = (slice(None), slice(2 * place, 2 * place + 2), slice(4 * part, 4 * part + 4))
            own = whole.detach()[mine].clone().requires_grad_()
            torch.manual_seed(5)
            found = DropoutInParts(0.3, tokens=(place, 3), columns=(part, 2))(own)
            assert torch.equal(found, right[mine])
            assert torch.equal(torch.autograd.grad(found.sum(), own)[0], slopes[mine])


def test_none_is_drawn_where_nothing_is_dropped() -> None:
    hidden = torch.randn(1, 4, 4)
    assert DropoutInParts(0.3, tokens=(1, 2)).eval()(hidden) is hidden
    assert DropoutInParts(0.0, columns=(1, 2))(hidden) is hidden
