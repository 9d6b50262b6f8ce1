"""Weights of few bits: what a row of bytes stands for, alone and in a layer."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from transformers.pytorch_utils import Conv1D

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.model.precision.quantized import (
    GROUP,
    Kind,
    QuantizedLayer,
    check_torch,
    ends_of,
    quantize,
    row_bytes,
    widen_rows,
)

KINDS: tuple[Kind, ...] = ("nf4", "int8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [1, 33, 64, 100, 192])
def test_rows_are_quantized_alone_and_each_number_to_its_nearest_value(kind: Kind, numbers: int) -> None:
    """By a plain search over all values that a block can have."""
    generator = torch.Generator().manual_seed(numbers)
    rows = torch.randn(7, numbers, generator=generator) * torch.linspace(0.01, 3, 7)[:, None]
    packed = quantize(rows, kind)
    assert packed.shape == (7, row_bytes(numbers, kind))
    assert torch.equal(packed, torch.cat([quantize(row[None], kind) for row in rows]))
    found = widen_rows(packed, numbers, kind, torch.float32)
    values = torch.arange(-127, 128) / 127 if kind == "int8" else None
    for row in range(7):
        blocks = rows[row].abs().split(GROUP)
        roots = torch.stack([block.max() for block in blocks]) ** 0.25
        for block in range(-(-numbers // GROUP)):
            piece = slice(block * GROUP, (block + 1) * GROUP)
            largest = float(rows[row, piece].abs().max())
            at = rows[row, piece].abs().argmax()
            scale = abs(found[row, piece][at])
            # Half a step of the fourth roots, or half of fp16's last digit.
            step = largest**0.75 * 4 * float(roots.max() - roots.min()) / 255 if kind == "nf4" else largest / 1024
            assert float(scale) == pytest.approx(largest, abs=step * 0.51 + 1e-6 * max(1.0, largest))
            if values is not None:
                distance = (rows[row, piece, None] - values * scale).abs().min(1).values
                assert torch.allclose((rows[row, piece] - found[row, piece]).abs(), distance, atol=1e-6)


def test_nf4_has_its_sixteen_values() -> None:
    """Numbers that are one of them, times a scale, are kept; what is between goes to the nearer one."""
    from raytune_fsdp.model.precision.quantized import _NF4

    values = torch.tensor(_NF4)
    rows = torch.stack([values.repeat(4), values.repeat(4) * 0.25])
    assert torch.allclose(widen_rows(quantize(rows, "nf4"), 64, "nf4", torch.float32), rows, atol=1e-7)
    for low, high in zip(values[:-1], values[1:], strict=True):
        for share, nearer in ((0.49, low), (0.51, high)):
            row = torch.cat([(low + share * (high - low))[None], torch.ones(63)])
            assert widen_rows(quantize(row[None], "nf4"), 64, "nf4", torch.float32)[0, 0] == nearer


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, refused in (("2.11.0+cu130", True), ("2.12.1", False), ("2.13.0+cpu", False)):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        with (
            pytest.raises(ConfigError, match=r"needs torch 2\.12 .* set method.type=lora") if refused else nullcontext()
        ):
            check_torch()


def test_the_bytes_of_a_real_row() -> None:
    assert row_bytes(4096, "nf4") / 4096 == pytest.approx(0.5176, abs=1e-4)
    assert row_bytes(4096, "int8") / 4096 == pytest.approx(1.0322, abs=1e-4)


@pytest.mark.parametrize(("kind", "most"), [("nf4", 1.01), ("int8", 1.001)])
@pytest.mark.parametrize("times", [1, 8, 32, 1000])
def test_a_block_of_large_numbers_does_not_cost_the_others_their_accuracy(kind: Kind, most: float, times: int) -> None:
    """Beside the same blocks in rows of their own, whose scale is exact. A block of zeros changes nothing, either."""
    rows = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    rows[:, 128:192] *= times
    rows[:, 256:320] = 0

    def error(packed_as: torch.Tensor) -> torch.Tensor:
        found = widen_rows(quantize(packed_as, kind), packed_as.shape[1], kind, torch.float32)
        wrong, blocks = (each.reshape(-1, GROUP).norm(dim=1) for each in (found - packed_as, packed_as))
        return (wrong[blocks > 0] / blocks[blocks > 0]).mean()

    assert error(rows) <= most * error(rows.reshape(-1, GROUP))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_shows(kind: Kind) -> None:
    rows = torch.zeros(3, 64)
    assert not widen_rows(quantize(rows, kind), 64, kind, torch.float32).any()
    rows[0, 3], rows[1, 5] = torch.nan, torch.inf
    shown = ends_of(quantize(rows, kind)).isfinite().all(1)
    assert shown.tolist() == [False, False, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_computes_with_its_widened_weight(kind: Kind, turned: bool) -> None:
    """Forward and backward are those of a plain layer with that weight, bit for bit; nothing wide is kept for it."""
    torch.manual_seed(0)
    plain: nn.Linear | Conv1D = Conv1D(48, 80) if turned else nn.Linear(80, 48)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    layer = QuantizedLayer(plain, kind)
    layer.packed.data = quantize(plain.weight.detach(), kind)
    plain.weight.data = widen_rows(layer.packed, plain.weight.shape[1], kind, torch.float32)
    assert torch.equal(layer.weight, plain.weight)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(5, 80, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = layer(x)
    assert sum(tensor.nbytes for tensor in kept) == layer.packed.nbytes
    wanted = plain(x)
    assert torch.allclose(found, wanted, atol=1e-5)
    (grad,) = torch.autograd.grad(found.square().sum(), x)
    (other,) = torch.autograd.grad(wanted.square().sum(), x)
    assert torch.allclose(grad, other, rtol=1e-5, atol=1e-3)
    assert not layer.packed.requires_grad
