"""Rows of new tokens that are trained alone learn what they would learn if the whole embedding were trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.added_rows import HeadWithRows, train_rows, weights_with_rows
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.objective.chunked_head import LossHead, install_chunked_loss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.proof import documents, error_of_loss
from raytune_fsdp.step.operations import count_architecture
from raytune_fsdp.step.optim.groups import undecayed_names
from tests.models import build
from tests.unit.test_adapters import network

IDS = (5, 17, 30, 130)
"""The last one is not in the data: as a target that is never right it has a gradient in the head all the same."""

OBJECTIVE = Objective(label_smoothing=0.1, z_loss=1e-2)


def learn(model: Any, parameters: list[torch.nn.Parameter], masked: bool) -> list[float]:
    """The losses of a few steps; `masked`: only the gradient of these rows is kept."""
    block = documents(model, torch.device("cpu"))
    sgd = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    losses = []
    for _ in range(6):
        total = micro_batch_loss(model, block, OBJECTIVE).total
        (total / block.target_tokens).backward()
        if masked:
            others = [row for row in range(parameters[0].shape[0]) if row not in IDS]
            for parameter in parameters:
                parameter.grad[others] = 0
        sgd.step()
        sgd.zero_grad()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("loss", ["chunked", "plain"])
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [
        *((each, torch.float64, 1e-10) for each in ("llama", "qwen3", "gemma3_text", "gpt2", "phi", "granite")),
        *((each, torch.float32, 1e-6) for each in ("llama", "gpt2")),
    ],
    ids=str,
)
def test_they_learn_as_in_the_whole_embedding(
    name: str, loss: str, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied and not, with a scale behind the look-up, a bias in the head, a scale behind the product."""
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", 131 * 5)
    whole = build(name, attn_implementation="eager").to(dtype).requires_grad_(False).eval()
    alone = copy.deepcopy(whole)
    alone.tie_weights()
    inputs, outputs = whole.get_input_embeddings(), whole.get_output_embeddings()
    tied = inputs.weight is outputs.weight
    train_rows(alone, set(IDS))
    if loss == "chunked":
        install_chunked_loss(whole)
        install_chunked_loss(alone)
    assert isinstance(alone.get_output_embeddings(), HeadWithRows)
    ends = [inputs.weight] if tied else [inputs.weight, outputs.weight]
    rows = [parameter for parameter in alone.parameters() if parameter.requires_grad]
    assert len(rows) == len(ends) and all(each.shape == (4, 32) for each in rows)
    with torch.no_grad():
        for mine, weight in zip(rows, ends, strict=True):
            mine.copy_(weight[list(IDS)])
    frozen = {key: tensor.clone() for key, tensor in alone.state_dict().items() if "added_rows" not in key}
    begun = [mine.detach().clone() for mine in rows]
    for weight in ends:
        weight.requires_grad_(True)
    expected = learn(whole, ends, masked=True)
    found = learn(alone, rows, masked=False)
    assert found == pytest.approx(expected, rel=bound) and found[-1] != pytest.approx(found[0], rel=10 * bound)
    for mine, weight, before in zip(rows, ends, begun, strict=True):
        # What is left of fp32 after six steps.
        assert (mine - weight[list(IDS)]).abs().max() <= bound * weight.abs().max()
        moved = (mine - before).abs().amax(-1) > 100 * bound
        assert moved[:3].all() and (moved[3] or mine is not rows[-1]), "an untied embedding is only read where it is"
    assert all(torch.equal(tensor, frozen[key]) for key, tensor in alone.state_dict().items() if key in frozen)
    assert error_of_loss(alone, torch.device("cpu")) < 1e-5


def test_the_chunked_head_knows_its_rows_in_bf16() -> None:
    """And rows that are moved far from the frozen ones are what is computed with."""
    model = build("llama", attn_implementation="eager").requires_grad_(False).eval()
    train_rows(model, IDS)
    install_chunked_loss(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    model = model.to(torch.bfloat16)
    assert isinstance(model.get_output_embeddings(), LossHead)
    assert error_of_loss(model, torch.device("cpu")) < 2e-2
    block = documents(model, torch.device("cpu"))
    micro_batch_loss(model, block).total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == {name for name, _, _ in weights_with_rows(model)}
    assert all(each.dtype == torch.bfloat16 and each.any() for each in grads.values())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_way_in_is_a_lookup_and_the_way_out_a_product(name: str) -> None:
    """Of the rows as of the rest; and everything behind them needs a gradient. They do not decay."""
    model = network(name, {"type": "lora", "target_modules": r".*layers\.1\..*proj"})
    plain = count_architecture(model)
    assert plain.leading_layers == 1
    train_rows(model, IDS)
    found = count_architecture(model)
    assert found.every_token.weights == plain.every_token.weights and found.leading_layers == 0
    assert found.targets.weights == plain.targets.weights + 4 * 32
    assert found.targets.frozen == plain.targets.frozen
    rows = {name for name, _, _ in weights_with_rows(model)} & {name for name, _ in model.named_parameters()}
    assert rows <= undecayed_names(model) and len(rows) == (2 if name == "llama" else 1)


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        (
            "llama",
            {"modules_to_save": ["lm_head"]},
            r"lm_head of a .* by method.modules_to_save, .*: leave it out",
        ),
        (
            "llama",
            {"target_modules": ["q_proj", "embed_tokens"]},
            r"embed_tokens of a .* by method.target_modules",
        ),
    ],
)
def test_what_is_trained_otherwise_is_refused(model: str, method: dict[str, Any], message: str) -> None:
    adapted = network(model, {"type": "lora", **method})
    with pytest.raises(ConfigError, match=f"^method.train_added_tokens=true: .*{message}"):
        train_rows(adapted, IDS)


def test_an_embedding_that_does_more_than_scale_is_refused() -> None:
    class Normed(torch.nn.Embedding):
        pass

    model = build("llama").requires_grad_(False)
    model.set_input_embeddings(Normed(131, 32))
    with pytest.raises(ConfigError, match=r"a LlamaForCausalLM has a Normed: set it to false, and name both modules"):
        train_rows(model, IDS)


def test_without_new_tokens_there_is_nothing_to_train() -> None:
    values = {
        "run": {"name": "x"},
        "model": {"path": "x"},
        "data": {"train": [{"path": "x"}]},
        "train": {"max_steps": 1, "global_batch": 1},
        "method": {"type": "lora", "train_added_tokens": True},
    }
    with pytest.raises(ValueError, match=r"tokens=true: model.add_tokens names no token.*: name the tokens"):
        FinetuneConfig.model_validate(values)
    FinetuneConfig.model_validate({**values, "model": {"path": "x", "add_tokens": ["<a>"]}})
    for method in ({"type": "full"}, {"type": "freeze", "trained": ["x"]}, {"type": "ia3"}):
        with pytest.raises(ValueError, match="train_added_tokens"):
            FinetuneConfig.model_validate({**values, "method": {**method, "train_added_tokens": True}})
