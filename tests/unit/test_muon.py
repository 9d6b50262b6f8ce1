"""Which adapters Muon makes orthogonal, and where it has nothing to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import OptimConfig
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.step.optim import muon
from raytune_fsdp.step.optim.matrices import check_matrices, hidden_matrices
from raytune_fsdp.step.optim.muon import orthogonal
from tests.models import build
from tests.runs import LLAMA, make_config

MUON = OptimConfig.model_validate({"optimizer": {"type": "muon"}})
NONE = r"optim.optimizer.type=muon: no matrix inside the layers is trained .* set optim.optimizer.type=adamw"


def test_the_adapters_of_experts_are_a_pair_each() -> None:
    """The products of an expert's pieces are what PEFT adds to its weight."""
    peft = pytest.importorskip("peft")
    model = build("mixtral")
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
        model,
    )
    found, named = hidden_matrices(model), dict(model.named_parameters())
    for parameter in named.values():
        torch.nn.init.normal_(parameter)
    at = "model.layers.0.mlp.experts.lora_{}.default.weight"
    a, b = (found[at.format(which)](named[at.format(which)]) for which in "AB")
    experts: Any = model.model.layers[0].mlp.experts
    added = torch.stack([second @ first for first, second in zip(a, b, strict=True)])
    assert torch.allclose(added, experts.get_delta_weight("default"), rtol=1e-4, atol=1e-5)
    own = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert len(found[own](named[own])) == 1


@pytest.mark.parametrize("adapter", ["LoraConfig", "IA3Config"])
def test_where_no_matrix_is_trained_muon_is_refused(adapter: str) -> None:
    peft = pytest.importorskip("peft")
    model = build("llama").requires_grad_(False)
    chosen = {"r": 1} if adapter == "LoraConfig" else {"feedforward_modules": ["down_proj"]}
    peft.inject_adapter_in_model(getattr(peft, adapter)(target_modules=["k_proj", "down_proj"], **chosen), model)
    with pytest.raises(ConfigError, match=NONE):
        check_matrices(model, MUON)
    check_matrices(model, OptimConfig())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    check_matrices(model, MUON)


def test_it_is_refused_before_a_run(tmp_path: Path) -> None:
    method = {"type": "freeze", "trained": ["embed_tokens", "norm"]}
    with pytest.raises(ConfigError, match=NONE):
        prepare(make_config(tmp_path, LLAMA, method=method, optim={"optimizer": {"type": "muon"}}), 1)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_many_matrices_at_once_have_the_bits_of_each(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have not, they are made orthogonal one after the other."""
    generator, many = torch.Generator().manual_seed(1), muon.Many()
    matrices = [torch.randn(shape, generator=generator) for _ in range(5)]
    wanted = [orthogonal(each, 5) for each in matrices]
    together: list[int] = []
    at_once = muon._at_once
    monkeypatch.setattr(muon, "_at_once", lambda some, times: together.append(len(some)) or at_once(some, times))
    many(matrices, 5)
    assert not together, "on a CPU nothing is tried"
    monkeypatch.setattr(many, "kinds", ("cpu",))
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(many(matrices, 5), wanted, strict=True))
    (alike,) = many.alike.values()
    assert together == ([5, 5, 5] if alike else [5]), "tried once"
    monkeypatch.setattr(muon, "_at_once", lambda some, times: [orthogonal(each, times) * 1.01 for each in some])
    other = muon.Many()
    monkeypatch.setattr(other, "kinds", ("cpu",))
    assert all(torch.equal(a, b) for a, b in zip(other(matrices, 5), wanted, strict=True))
    assert list(other.alike.values()) == [False]
