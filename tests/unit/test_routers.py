"""The losses of routers are those of transformers, whatever is computed again; the load of experts is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from raytune_fsdp.base.batch import PADDING, MicroBatch
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import TrainConfig
from raytune_fsdp.data.batches import filler
from raytune_fsdp.model.attention.choose import inputs_of
from raytune_fsdp.model.layers import set_training_forward
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import CROSS_ENTROPY, Objective
from raytune_fsdp.model.objective.routers import (
    check_routers,
    names_of_routers,
    numbers_of_experts,
    routers_of,
    watch_routers,
)
from raytune_fsdp.model.precision.quantized import QuantizedLayer, quantize_layers
from raytune_fsdp.model.proof import documents
from tests.models import architecture, build

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "ernie4_5_moe", "granitemoehybrid")
AUX, Z = 0.3, 0.07


def train(**values: float) -> TrainConfig:
    return TrainConfig(global_batch=1, max_steps=1, **values)


def made(name: str, **values: float) -> tuple[Any, Objective]:
    model = build(name, attn_implementation="eager").train()
    model.set_experts_implementation("eager")
    config = train(**values)
    check_routers(model, config)
    return model, Objective.of(config, watch_routers(model, config))


@pytest.fixture
def block() -> MicroBatch:
    """Two samples of 19 tokens, of which the second ends in eight of padding."""
    found = documents(build("llama"), torch.device("cpu"))
    sources = found.source_ids.clone()
    sources[1, 11:] = PADDING
    return replace(found, source_ids=sources)


def by_the_book(model: Any, block: MicroBatch) -> torch.Tensor:
    """From the router logits that transformers returns, by its own function."""
    inputs = inputs_of(model, block.input_ids, block.position_ids, block.borders)
    plain = micro_batch_loss(model, block).total
    logits = model(**inputs, output_router_logits=True).router_logits
    text = model.config.get_text_config()
    real = block.source_ids != PADDING
    aux = load_balancing_loss_func(logits, logits[0].shape[-1], text.num_experts_per_tok, real.long())
    rows = torch.cat([each.float()[real.flatten()] for each in logits])
    return plain + block.target_tokens * (AUX * aux + Z * rows.logsumexp(-1).square().mean())


@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_those_of_transformers(name: str, block: MicroBatch) -> None:
    model, objective = made(name, router_aux_loss_coef=AUX, router_z_loss_coef=Z)
    wanted = by_the_book(model, block)
    wanted.backward()
    right = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = micro_batch_loss(model, block, objective)
    found.total.backward()
    assert found.total.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert found.total.item() > 1.001 * micro_batch_loss(model, block).total.item()
    for key, parameter in model.named_parameters():
        if key in right:
            assert (parameter.grad - right[key]).abs().max() <= 1e-5 * max(right[key].abs().max().item(), 1e-3), key


@pytest.mark.parametrize("recompute", ["full", "every_n", "selective"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_blocks_that_are_computed_again_have_the_same(name: str, recompute: str, block: MicroBatch) -> None:
    """The hooks run a second time in backward, in which they add nothing."""
    results = []
    for how in ("none", recompute):
        model, objective = made(name, router_aux_loss_coef=AUX, router_z_loss_coef=Z)
        install_chunked_loss(model)
        set_training_forward(model, recompute=how, every=2 if how == "every_n" else None)
        for _ in range(2):  # the second block begins with nothing of the first
            model.zero_grad()
            found = micro_batch_loss(model, block, objective)
            found.total.backward()
        results.append((found, {key: p.grad for key, p in model.named_parameters()}))
    (plain, wanted), (again, got) = results
    assert torch.equal(plain.total, again.total)
    assert len(again.load) == 2 and all(map(torch.equal, plain.load, again.load))
    assert all(torch.equal(wanted[key], got[key]) for key in wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_load_is_that_of_the_tokens(name: str, block: MicroBatch) -> None:
    """Without losses they are counted as well, and change nothing."""
    model, objective = made(name)
    found = micro_batch_loss(model, block, objective)
    assert torch.equal(found.total, micro_batch_loss(model, block).total)
    chosen: list[torch.Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    hooks = [m.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for m in routers]
    micro_batch_loss(model, block)
    for hook in hooks:
        hook.remove()
    real = (block.source_ids != PADDING).flatten()
    assert objective.experts == (len(chosen), len(found.load[0])) and len(chosen) == len(found.load)
    for load, experts in zip(found.load, chosen, strict=True):
        assert load.tolist() == torch.bincount(experts[real].flatten(), minlength=len(load)).tolist()


def test_a_router_that_returns_no_choice_is_counted_by_its_logits(block: MicroBatch) -> None:
    """Llama 4's returns scores and logits. Its load is a metric, and must not stop a run."""
    model, objective = made("llama4_text")
    found = micro_batch_loss(model, block, objective)
    real = int((block.source_ids != PADDING).sum())
    assert len(found.load) == 2 and all(load.sum() == real and len(load) == 4 for load in found.load)


def test_a_filler_adds_nothing_and_evaluations_are_without_them(block: MicroBatch) -> None:
    model, objective = made("mixtral", router_aux_loss_coef=AUX, router_z_loss_coef=Z)
    install_chunked_loss(model)
    none = micro_batch_loss(model, filler(2, seq_len=19, pad_id=0), objective)
    none.total.backward()
    assert none.total.item() == 0.0 and not any(each.any() for each in none.load)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    with torch.no_grad():
        evaluated = micro_batch_loss(model.eval(), block)
    assert (
        torch.equal(evaluated.total, micro_batch_loss(model.train(), block, CROSS_ENTROPY).total) and not evaluated.load
    )


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "nemotron_h"])
@pytest.mark.parametrize("field", ["router_aux_loss_coef", "router_z_loss_coef"])
def test_what_has_no_such_loss_is_refused(name: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.{field}=0\.01: a \w+ has no load-balancing loss .* leave it out"):
        check_routers(build(name), train(**{field: 0.01}))
    check_routers(build(name), train())


def test_a_router_of_several_layers_is_known_by_its_config(block: MicroBatch) -> None:
    """Zaya's makes its logits from features of its own, and has a choice more than experts: to use none."""
    zaya = pytest.importorskip("transformers.models.zaya")
    sizes = {"num_experts": 4, "router_hidden_size": 8, "moe_intermediate_size": 16}
    model = zaya.ZayaForCausalLM(zaya.ZayaConfig(**{**architecture("qwen3"), **sizes, "model_type": "zaya"}))
    assert numbers_of_experts(model) == {4}
    matrices = ([p for p in module.parameters() if p.ndim == 2] for module, _ in routers_of(model))
    rows = [max(each, key=torch.Tensor.numel).shape[0] for each in matrices]
    assert rows == [8, 8], "the largest matrix of a router is not the one that chooses"
    assert watch_routers(model, train()) is None
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        check_routers(model, train(router_aux_loss_coef=AUX))
    micro_batch_loss(model.train(), block).total.backward()
    quantize_layers(model.requires_grad_(False), "nf4")
    packed = [name for name, module in model.named_modules() if isinstance(module, QuantizedLayer)]
    assert len(packed) == 2 * 5 and not [name for name in packed if "gate" in name]


# --- Those of every mixture -------------------------------------------------------------------------------------------

LIKE_QWEN3 = {key: value for key, value in architecture("qwen3").items() if key != "model_type"}
CHANGED: dict[str, dict[str, Any]] = {
    "doge": {"is_moe": True},
    "dots1": {**LIKE_QWEN3, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "hunyuan_v1_moe": {**LIKE_QWEN3, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen4_exp_text": {**LIKE_QWEN3, "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""By the kind of model, what its default config lacks, or has for another number of layers."""
WITHOUT = {
    "bamba": "its source names experts, and it has none",
    "dbrx": "transformers cannot build its default config",
    "gemma4": "sees; gemma4_text is its language model",
    "llama4": "sees; llama4_text",
    "qwen3_5_moe": "sees; qwen3_5_moe_text",
    "qwen4_exp": "sees; qwen4_exp_text",
}


def mixtures() -> list[str]:
    """Return the kinds of causal language models whose source in transformers names experts."""
    models = Path(transformers.__file__).parent / "models"
    files = {kind: models / model_type_to_module_name(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return sorted(
        kind for kind, room in files.items() if any("xperts" in f.read_text() for f in room.glob("modeling_*"))
    )


@pytest.mark.slow  # 60 networks on the meta device
def test_the_routers_of_every_mixture_in_transformers_are_found_and_nothing_else() -> None:
    found = mixtures()
    assert len(found) > 50 and {*found} > WITHOUT.keys()
    for kind in (kind for kind in found if kind not in WITHOUT):
        config = CONFIG_MAPPING[kind](**{"num_hidden_layers": 4, **CHANGED.get(kind, {})})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        for name in names_of_routers(model):
            router, owner = (model.get_submodule(each) for each in (name, name.rpartition(".")[0]))
            assert 0 < numbers_in(router) < 0.01 * numbers_in(owner) or kind in CHANGED, (kind, name)


def numbers_in(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_router_of_a_mixture_that_returns_logits_itself_is_its_gate(block: MicroBatch) -> None:
    """Doge's logits are of keys, of which an expert is two: no load is counted, and no loss is made of them."""
    values = {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["doge"](**{**LIKE_QWEN3, **values}))
    assert names_of_routers(model) == [f"model.layers.{at}.mlp.router_gate" for at in range(2)]
    assert watch_routers(model, train()) is None
    with pytest.raises(ConfigError, match="no routers that return one logit for each expert"):
        check_routers(model, train(router_aux_loss_coef=AUX))


def test_routers_of_attention_are_routers() -> None:
    """JetMoe chooses experts in both, and names its attention along with the router in it."""
    values = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["jetmoe"](**{**LIKE_QWEN3, **values}))
    layer = "model.layers.0"
    assert names_of_routers(model) == [f"{layer}.mlp.router", f"{layer}.self_attention.experts.router"]
    assert watch_routers(model, train()) is None, "several classes return their logits"
