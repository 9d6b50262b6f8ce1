"""What is learned of a teacher: the book's divergences and their gradients, in chunks as from all logits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from raytune_fsdp.base.batch import Targets, Taught
from raytune_fsdp.config import TrainConfig
from raytune_fsdp.model.attention.choose import logits_of
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.objective.chunked_head import Shape, install_chunked_loss, linear_cross_entropy
from raytune_fsdp.model.objective.distillation import Distillation, _largest, predictions
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.losses import Losses
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.proof import documents
from tests.models import VOCABULARY, build

CPU = torch.device("cpu")
PLAIN = Shape()
TARGETS = 37
WEIGHTS = [
    Distillation(),
    Distillation(forward=0.0, reverse=1.0),
    Distillation(forward=0.7, reverse=0.2, cross_entropy=0.4),
    Distillation(forward=0.7, reverse=0.2, cross_entropy=0.4, temperature=2.5),
    Distillation(reverse=0.5, temperature=0.5),
]


def of_teacher(k: int, temperature: float = 1.0, sharpness: float = 3.0) -> tuple[Taught, torch.Tensor]:
    """What a teacher says, with its k most likely tokens, and the logarithms of all of its probabilities."""
    drawn = torch.randn(TARGETS, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    every = (sharpness * drawn / temperature).log_softmax(-1)
    values, ids = every.sort(-1, descending=True)
    rest = values[:, k:].logsumexp(-1) if k < VOCABULARY else torch.full((TARGETS,), -math.inf, dtype=torch.float64)
    return Taught(ids=ids[:, :k].int(), log_probabilities=values[:, :k], rest=rest), every


def targets_of(taught: Taught | None, count: int = TARGETS) -> Targets:
    ids = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))
    return Targets(
        places=torch.arange(count), ids=ids, datasets=torch.zeros_like(ids), by_dataset=(count,), teacher=taught
    )


def parts(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((TARGETS, 16), (VOCABULARY, 16), (VOCABULARY,))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for shape in shapes)
    return [each.to(dtype).requires_grad_() for each in drawn]


def found_by_us(ours: list[torch.Tensor], what: Distillation, targets: Targets, shape: Shape = PLAIN) -> Losses:
    lesson = what.lesson(targets, ours[0].new_empty(0, dtype=chunked_head._wide(ours[0])))
    return linear_cross_entropy(*ours, targets.ids, shape, Objective(distillation=what), lesson=lesson)


def found_plainly(logits: torch.Tensor, what: Distillation, targets: Targets) -> Losses:
    return what.lesson(targets, logits).losses(
        logits, logits.log_softmax(-1), logits.argmax(-1)[targets.places] == targets.ids
    )


def logits_by_the_book(right: list[torch.Tensor], shape: Shape = PLAIN) -> torch.Tensor:
    logits = nn.functional.linear(*right) * shape.scale
    return shape.softcap * torch.tanh(logits / shape.softcap) if shape.softcap else logits


def divergences(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)


def by_the_book(logits: torch.Tensor, log_p: torch.Tensor, ids: torch.Tensor, what: Distillation) -> torch.Tensor:
    """Each loss, of all tokens: one after the other, as a plain loop would have them."""
    forward, reverse = divergences(log_p, (logits / what.temperature).log_softmax(-1))
    nll = nn.functional.cross_entropy(logits, ids, reduction="none")
    return what.temperature**2 * (what.forward * forward + what.reverse * reverse) + what.cross_entropy * nll


def differs(ours: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    pairs = zip(ours, right, strict=True)
    return max(float((a.grad.double() - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("shape", [Shape(), Shape(scale=8.0, softcap=5.0)], ids=str)
@pytest.mark.parametrize("what", WEIGHTS, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_all_of_the_vocabulary(
    what: Distillation, shape: Shape, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", VOCABULARY * 5)
    taught, log_p = of_teacher(VOCABULARY, what.temperature)
    targets, ours = targets_of(taught), parts(dtype)
    right = [each.detach().double().requires_grad_() for each in ours]
    found = found_by_us(ours, what, targets, shape)
    logits = logits_by_the_book(right, shape)
    each = by_the_book(logits, log_p, targets.ids, what)
    (found.total * 0.125).backward()
    (each.sum() * 0.125).backward()
    assert (found.each.double() - each).abs().max() <= bound * each.abs().max()
    assert found.total.item() == pytest.approx(each.sum().item(), rel=bound)
    assert differs(ours, right) <= bound
    if dtype == torch.float64:
        assert torch.equal(found.right, logits.argmax(-1) == targets.ids)


@pytest.mark.parametrize("what", WEIGHTS, ids=str)
def test_both_ways_agree_where_a_part_is_kept(what: Distillation, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, with the gradient written out, and from all logits, where torch finds it; the figures, too."""
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", VOCABULARY * 5)
    targets, ours = targets_of(of_teacher(7, what.temperature)[0]), parts()
    right = [each.detach().requires_grad_() for each in ours]
    found = found_by_us(ours, what, targets)
    logits = logits_by_the_book(right)
    plain = found_plainly(logits, what, targets)
    (found.total * 0.125).backward()
    (plain.total * 0.125).backward()
    assert torch.allclose(found.each, plain.each, rtol=1e-12, atol=1e-12) and differs(ours, right) <= 1e-12
    assert found.groups is not None and plain.groups is not None
    assert torch.allclose(found.groups.figures, plain.groups.figures, rtol=1e-12, atol=1e-12)
    assert len(plain.groups.figures) == 3 + bool(what.forward) + bool(what.reverse)


@pytest.mark.parametrize("k", [1, 64])
def test_what_is_lost_with_the_others(k: int) -> None:
    """Of each divergence, that among the others; of the forward one's gradient, at most twice what they have."""
    taught, log_p = of_teacher(k)
    targets = targets_of(taught)
    logits = logits_by_the_book(parts()).detach()
    out = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, taught.ids.long(), False)
    log_q = logits.log_softmax(-1)
    mass = [each.masked_fill(~out, -math.inf).logsumexp(-1) for each in (log_p, log_q)]
    among = [(each - own[:, None]).masked_fill(~out, 0) for each, own in zip((log_p, log_q), mass, strict=True)]
    for number, what in enumerate((Distillation(), Distillation(forward=0.0, reverse=1.0))):
        own, full = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        plain = found_plainly(own, what, targets)
        whole = divergences(log_p, full.log_softmax(-1))[number]
        one, other = (among[number], among[1 - number])
        lost = mass[number].exp() * (one.exp() * out * (one - other)).sum(-1)
        assert torch.allclose(whole - plain.each, lost, rtol=1e-9, atol=1e-12) and bool((lost > 0).all())
        plain.total.backward()
        whole.sum().backward()
        if number == 0:
            apart = (own.grad - full.grad).abs().sum(-1)
            assert bool((apart <= 2 * mass[0].exp()).all()) and bool((apart > 0).all())


def test_what_is_next_to_impossible() -> None:
    """Tokens that a type has no probability for, of the teacher, of the student, and of all that is not kept."""
    logits = torch.zeros(2, 8, dtype=torch.float32)
    logits[0, 3:] = -300.0
    logits[1, 0] = -300.0
    taught = Taught(
        ids=torch.arange(3).repeat(2, 1).int(),
        log_probabilities=torch.tensor([[-0.7, -0.7, -250.0]] * 2), rest=torch.tensor([-4.0, -200.0]),
    )  # fmt: skip
    targets = replace(targets_of(taught, 2), ids=torch.tensor([1, 7]))
    for what in (Distillation(), Distillation(forward=0.0, reverse=1.0)):
        wide = taught_in(torch.float64, targets)
        with_grad = logits.double().requires_grad_()
        plain = found_plainly(with_grad, what, wide)
        plain.total.backward()
        found = logits.clone()
        each, _ = what.lesson(targets, found).losses_and_gradients(found, slice(0, 2), None)
        assert torch.allclose(each.double(), plain.each, rtol=1e-6)
        assert torch.allclose(found.double(), with_grad.grad, rtol=1e-5, atol=1e-6)
    assert plain.each[1] > 40, "or nothing was improbable"


def taught_in(dtype: torch.dtype, targets: Targets) -> Targets:
    said = targets.teacher
    assert said is not None
    wide = replace(said, log_probabilities=said.log_probabilities.to(dtype), rest=said.rest.to(dtype))
    return replace(targets, teacher=wide)


def test_a_filler_weighs_nothing_and_a_teacher_that_is_silent_is_an_error() -> None:
    hidden, weight, bias = parts()
    ours = [hidden.detach()[:0].requires_grad_(), weight, bias]
    found = found_by_us(ours, Distillation(), targets_of(None, 0))
    found.total.backward()
    assert found.total.item() == 0.0 and not weight.grad.any()
    assert found.groups is not None and found.groups.figures.shape == (4, 0)
    with pytest.raises(RuntimeError, match="the teacher's predictions of 37 targets are not there"):
        Distillation().lesson(targets_of(None), hidden)


@pytest.mark.parametrize("k", [5, VOCABULARY, 1000])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_a_network_predicts(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both heads; and learned from itself, it has nothing to learn."""
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", VOCABULARY * 5)
    model = build(name, attn_implementation="eager").double().eval()
    batch = documents(model, CPU)
    logits = logits_of(model, batch.input_ids, batch.position_ids, batch.borders).flatten(0, 1)[batch.targets.places]
    every = (logits / 1.5).log_softmax(-1).detach()
    values, ids = every.sort(dim=-1, descending=True, stable=True)
    for chunked in (False, True):
        if chunked:
            install_chunked_loss(model)
        said = predictions(model, batch, top_k=k, temperature=1.5, dtype=torch.float64)
        assert said.ids.dtype == torch.int32 and torch.equal(said.ids.long(), ids[:, :k])
        assert torch.allclose(said.log_probabilities, values[:, :k], rtol=1e-12, atol=1e-12)
        assert torch.allclose(said.rest, values[:, k:].logsumexp(-1), rtol=1e-12, atol=1e-12)
        own = replace(batch, targets=replace(batch.targets, teacher=said))
        learned = micro_batch_loss(model, own, Objective(distillation=Distillation(reverse=1.0, temperature=1.5)))
        learned.total.backward()
        assert learned.each.abs().max() <= 1e-12
        assert max(float(each.grad.abs().max()) for each in model.parameters()) <= 1e-12
        fewer = predictions(model, batch, top_k=k, temperature=1.0, dtype=torch.float32, tokens=100)
        few = logits[:, :100].log_softmax(-1)
        assert fewer.log_probabilities.dtype == torch.float32 and fewer.ids.shape[1] == min(k, 100)
        assert torch.allclose(fewer.log_probabilities, few.sort(-1, descending=True)[0][:, :k].float())


def test_equal_tokens_come_in_the_order_of_their_ids() -> None:
    values = torch.tensor([[1.0, 2.0, 2.0, 0.0, 1.0, 1.0, 2.0], [0.0] * 7, [-math.inf] * 6 + [0.0]])
    for many, ids in ((4, [[1, 2, 6, 0], [0, 1, 2, 3], [6, 0, 1, 2]]), (2, [[1, 2], [0, 1], [6, 0]])):
        assert _largest(values, many)[1].tolist() == ids


@pytest.mark.parametrize(
    ("field", "value"), [("label_smoothing", 0.1), ("z_loss", 1e-4), ("loss", "losses_of_mine:focal")]
)
def test_what_changes_the_cross_entropy_is_refused(field: str, value: float | str) -> None:
    values = {"max_steps": 1, "global_batch": 1, "micro_batch": 1, "objective": {"type": "distill"}}
    assert TrainConfig.model_validate({**values, "neftune_noise_alpha": 5.0}).neftune_noise_alpha == 5.0
    with pytest.raises(
        ValidationError, match=f"train.{field}={value} with train.objective.type=distill: .*leave {field} out"
    ):
        TrainConfig.model_validate({**values, field: value})
