"""Losses and gradients without the logits of a batch are those with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import ModelConfig
from raytune_fsdp.model.attention.choose import KernelNeeds, logits_of
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.objective.chunked_head import (
    LossHead,
    Shape,
    install_chunked_loss,
    linear_cross_entropy,
)
from raytune_fsdp.model.objective.loss import micro_batch_loss, plain_losses
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.objective.score_head import choose_loss
from raytune_fsdp.model.proof import documents
from tests.models import ARCHITECTURES, EXPERTS, SCALED, build

SHAPES = [Shape(), Shape(scale=0.25), Shape(softcap=3.0), Shape(scale=8.0, softcap=5.0)]


def parts(dtype: torch.dtype, tokens: int = 37, bias: bool = True) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 16), (131, 16), (131,))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in shapes)
    made = [each.to(dtype).requires_grad_() for each in drawn]
    return [*made[:2], made[2] if bias else None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_values_and_gradients(
    shape: Shape, bias: bool, dtype: torch.dtype, bound: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", 131 * chunk)
    ids = torch.randint(131, (37,), generator=torch.Generator().manual_seed(1))
    ours, plain = parts(dtype, bias=bias), [None if x is None else x.detach().double() for x in parts(dtype, bias=bias)]
    right = [None if x is None else x.requires_grad_() for x in plain]
    found = linear_cross_entropy(*ours, ids, shape)
    logits = nn.functional.linear(*right) * shape.scale
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    each = nn.functional.cross_entropy(logits, ids, reduction="none")
    (found.total * 0.125).backward()
    (each.sum() * 0.125).backward()
    assert (found.each.double() - each).abs().max() <= bound * each.abs().max()
    assert found.total.item() == pytest.approx(each.sum().item(), rel=bound)
    if dtype != torch.bfloat16 and not shape.softcap:  # near ties may fall otherwise
        assert torch.equal(found.right, logits.argmax(-1) == ids)
    for a, b in zip(ours, right, strict=True):
        if a is not None:
            assert a.grad.dtype == dtype and (a.grad.double() - b.grad).abs().max() <= bound * b.grad.abs().max()


OBJECTIVES = [
    Objective(label_smoothing=0.1),
    Objective(z_loss=0.03),
    Objective(label_smoothing=0.3, z_loss=1e-2),
]


def by_the_book(logits: torch.Tensor, ids: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Each loss, smoothed as transformers' LabelSmoother does it, and the square of the softmax's normaliser."""
    minus = -nn.functional.log_softmax(logits, -1)
    nll, spread = minus.gather(-1, ids[:, None])[:, 0], minus.sum(-1) / logits.shape[-1]
    smoothed = (1 - objective.label_smoothing) * nll + objective.label_smoothing * spread
    return smoothed + objective.z_loss * torch.log(logits.exp().sum(-1)) ** 2


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_smoothing_and_z_loss(
    objective: Objective, shape: Shape, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", 131 * 5)
    ids = torch.randint(131, (37,), generator=torch.Generator().manual_seed(1))
    ours, right = parts(dtype), [x.detach().double().requires_grad_() for x in parts(dtype)]
    found = linear_cross_entropy(*ours, ids, shape, objective)
    logits = nn.functional.linear(*right) * shape.scale
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    each = by_the_book(logits, ids, objective)
    (found.total * 0.125).backward()
    (each.sum() * 0.125).backward()
    assert (found.each.double() - each).abs().max() <= bound * each.abs().max()
    assert found.total.item() == pytest.approx(each.sum().item(), rel=bound)
    for a, b in zip(ours, right, strict=True):
        assert (a.grad.double() - b.grad).abs().max() <= bound * b.grad.abs().max()
    alone = nn.functional.cross_entropy(logits, ids, reduction="sum").item()
    if dtype != torch.bfloat16:
        assert abs(found.total.item() - alone) > 3 * bound * alone, "or the comparison says nothing"


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_both_heads_of_a_network_smooth_alike(name: str, objective: Objective) -> None:
    """And as the book says, over the tokens that are trained on and no others."""
    model = build(name, attn_implementation="eager").double()
    block = documents(model, torch.device("cpu"))
    logits = logits_of(model, block.input_ids, block.position_ids, block.borders).flatten(0, 1)[block.targets.places]
    each = by_the_book(logits, block.targets.ids, objective)
    each.sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    for chunked in (False, True):
        model.zero_grad()
        if chunked:
            install_chunked_loss(model)
        found = micro_batch_loss(model, block, objective)
        found.total.backward()
        assert torch.allclose(found.each, each, rtol=1e-12, atol=1e-12)
        assert found.total.item() == pytest.approx(each.sum().item(), rel=1e-12)
        for key, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, wanted[key], rtol=1e-9, atol=1e-12), key
        plain = micro_batch_loss(model, block).each
        assert torch.allclose(plain, nn.functional.cross_entropy(logits, block.targets.ids, reduction="none"))


def test_smoothing_is_that_of_transformers() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model = build("llama")
    block = documents(model, torch.device("cpu"))
    logits = logits_of(model, block.input_ids, block.position_ids, block.borders)
    theirs = LabelSmoother(epsilon=0.2)({"logits": logits}, block.labels, shift_labels=True)
    ours = micro_batch_loss(model, block, Objective(label_smoothing=0.2)).total / block.target_tokens
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_without_gradients_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation needs losses alone. That of the weight would be as large as the weight, in fp32."""
    added: list[torch.Tensor] = []
    monkeypatch.setattr(chunked_head, "_add_product", lambda sum_, *_: added.append(sum_))
    hidden, weight, bias = parts(torch.float32)
    ids = torch.randint(131, (37,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, bias, ids, Shape())
    assert not added and not found.total.requires_grad
    learning = linear_cross_entropy(hidden, weight, bias, ids, Shape())
    assert len(added) == 1 and torch.equal(learning.each, found.each) and torch.equal(learning.right, found.right)


def test_no_targets_at_all() -> None:
    """A filler: it weighs nothing, but backward must run through it, or ranks would wait for each other."""
    hidden, weight, _ = parts(torch.float32, tokens=0)
    found = linear_cross_entropy(hidden, weight, None, torch.empty(0, dtype=torch.int64), Shape())
    found.total.backward()
    assert found.total.item() == 0.0 and len(found.each) == 0
    assert not weight.grad.any() and hidden.grad.shape == (0, 16)


@pytest.mark.parametrize("wide", [False, True])
def test_a_factor_is_not_rounded_to_the_16_bits_of_what_it_scales(wide: bool) -> None:
    """In a new run; one that was begun with a rounded factor keeps it."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1500, 8).bfloat16().requires_grad_(), torch.randn(11, 8).bfloat16().requires_grad_()
    ids, found = torch.arange(1500) % 11, {}
    for factor in (1.0, 1 / 773):
        total = linear_cross_entropy(hidden, weight, None, ids, Shape(), wide=wide).total
        found[factor] = torch.autograd.grad(total * factor, [hidden, weight])[0]
    right = (found[1.0].float() * torch.tensor(1 / 773)).bfloat16()
    assert torch.equal(found[1 / 773], right) is wide


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "eager") for name in (*ARCHITECTURES, *EXPERTS, *SCALED)]
    + [(name, "documents_cpu") for name in ("llama", "gemma3_text", "mixtral")],
)
def test_a_network_with_it_has_the_losses_and_gradients_of_its_own(name: str, attention: str) -> None:
    model = build(name).double()  # in fp32 rounding alone is 1.4e-5 of a gradient on some processors
    model.set_attn_implementation(attention)
    if name in EXPERTS:
        model.set_experts_implementation("eager")  # torch's grouped product knows no fp64
    block = documents(model, torch.device("cpu"))
    plain = plain_losses(logits_of(model, block.input_ids, block.position_ids, block.borders), block)
    plain.total.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    names = list(model.state_dict())
    install_chunked_loss(model)
    assert isinstance(model.get_output_embeddings(), LossHead) and list(model.state_dict()) == names
    found = micro_batch_loss(model, block)
    found.total.backward()
    assert found.total.item() == pytest.approx(plain.total.item(), rel=1e-12)
    assert torch.allclose(found.each, plain.each, rtol=1e-12, atol=1e-12) and torch.equal(found.right, plain.right)
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (got[key] - value).abs().max() <= 1e-12 * max(value.abs().max().item(), 1e-3), key


def test_which_loss_a_run_gets() -> None:
    any_, own = KernelNeeds(), KernelNeeds(plain_loss="its head is not one linear layer")
    auto, chunked = ModelConfig(path="m", loss="auto"), ModelConfig(path="m", loss="chunked")
    plain = ModelConfig(path="m", loss="plain")
    assert choose_loss(auto, any_, kept=None).name == "chunked"
    assert choose_loss(auto, any_, kept="plain").name == "plain", "as the run began"
    assert choose_loss(chunked, any_, kept="plain").name == "chunked"
    assert choose_loss(plain, any_, kept="chunked").name == "plain"
    assert choose_loss(auto, own, kept="chunked").name == "plain"
    with pytest.raises(ConfigError, match=r"^model\.loss=chunked: its head is not one linear layer; set"):
        choose_loss(chunked, own, kept=None)
