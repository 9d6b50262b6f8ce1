"""What can be wrong with a method is said before anything starts, with a way out; adapters begin alike everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError, ModelError, UserError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import LoraMethod
from raytune_fsdp.model.adapters.attach import (
    AdaptedWeights,
    _nearest,
    adapter_tensors,
    base_name,
    frozen_experts,
    stored_names,
    unadapted,
)
from raytune_fsdp.model.adapters.config_file import adapter_method, put_adapter_config
from raytune_fsdp.model.adapters.merge import MergedWeights
from raytune_fsdp.model.attention.choose import KernelNeeds, logits_of
from raytune_fsdp.model.fill import init_buffers
from raytune_fsdp.model.network import build_base, build_network, load_architecture
from raytune_fsdp.model.objective.routers import routers_of
from raytune_fsdp.model.precision.quantized import quantize_layers
from raytune_fsdp.model.weights.source import RandomWeights
from raytune_fsdp.run.network_checks import CHECKS
from raytune_fsdp.run.starting_weights import first_weights, without_adapters
from raytune_fsdp.step.precision import store_frozen
from tests.models import architecture

pytest.importorskip("peft")

LLAMA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


HUNYUAN = {
    **architecture("qwen3_moe"), "model_type": "hunyuan_v1_moe", "moe_topk": 2, "num_experts": 4, "head_dim": 8,
}  # fmt: skip


def settings(
    model: str | dict[str, Any], method: dict[str, Any], precision: str = "fp32", attention: str = "auto"
) -> FinetuneConfig:
    inline = architecture(model) if isinstance(model, str) else model
    return FinetuneConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"init": "random", "architecture": inline, "attention": attention},
            "data": {"train": [{"path": "x"}]},
            "train": {"max_steps": 1, "global_batch": 1},
            "parallel": {"precision": precision},
            "method": method,
        }
    )


def network(model: str | dict[str, Any], method: dict[str, Any], precision: str = "fp32") -> Any:
    return network_of(settings(model, method, precision))


def network_of(config: FinetuneConfig) -> Any:
    return build_network(load_architecture(config.model, None), config)


def test_a_network_keeps_the_attention_that_was_chosen_for_it_while_its_weights_are_read() -> None:
    """Whoever reads them builds the network again, with what model.attention names."""
    config = settings("llama", {"type": "lora"}, attention="eager")
    adapted = build_network(load_architecture(config.model, None), config)
    adapted.set_attn_implementation("sdpa")
    without_adapters(config, adapted)
    first_weights(config, None, adapted, "sharded")
    assert adapted.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        ("llama", {"type": "lora", "target_modules": ["q_porj"]}, r"its linear layers are called q_proj"),
        (
            "llama",
            {"type": "lora", "target_modules": ["q_proj", "w1"]},
            r"target_modules: 'w1' is the name of no module",
        ),
        ("llama", {"type": "lora", "modules_to_save": ["lmhead"]}, r"modules_to_save: 'lmhead' .* called .*lm_head"),
        ("gpt2", {"type": "lora", "target_modules": ["attn"]}, r"target_modules=\['attn'\]: PEFT cannot adapt a GPT2"),
        (
            "mixtral",
            {"type": "lora", "target_parameters": ["experts.up"]},
            r"has no such weights; its weights are called",
        ),
        ("mixtral", {"type": "lora", "target_modules": ["w1", "w3"]}, r"takes some of these names for the experts"),
        ("qwen3", {"type": "lora", "target_modules": ["embed_tokens"]}, r"embed_tokens of a Qwen3.* shares its weight"),
        ("qwen3", {"type": "lora", "target_modules": ["lm_head"]}, r"lm_head of a Qwen3.* shares its weight"),
        ("llama", {"type": "lora", "target_modules": ["embed_tokens"], "dora": True}, r"embed_tokens is an embedding"),
        ("opt", {"type": "ia3", "target_modules": ["qproj"], "feedforward_modules": []}, r"called .*q_proj"),
        (
            "olmo2",
            {"type": "ia3"},
            r"which modules of a Olmo2ForCausalLM IA3 scales: name .* called q_proj",
        ),
        (
            "llama",
            {"type": "freeze", "trained": ["layer\\.1"]},
            r"is found in the name of no weight of a LlamaForCausalLM",
        ),
    ],
)
def test_a_name_that_matches_nothing_is_refused_with_those_that_there_are(
    model: str, method: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        network(model, method)


@pytest.mark.parametrize("expression", ["q_proj", r"layers\.0.*q_proj", ".*gate_up_proj"])
def test_an_expression_that_adapts_no_module_is_refused_although_weights_are_adapted(expression: str) -> None:
    """PEFT is content with the experts' weights."""
    method = {"type": "lora", "target_modules": expression, "target_parameters": ["mlp.experts.gate_up_proj"]}
    with pytest.raises(ConfigError, match=r"matches the whole name of no module of a Qwen3Moe.* called .*q_proj"):
        network("qwen3_moe", method)


@pytest.mark.parametrize("targets", [".*q_proj", "all-linear", []])
def test_experts_are_adapted_beside_what_an_expression_matches(targets: Any) -> None:
    method = {"type": "lora", "target_modules": targets, "target_parameters": ["mlp.experts.gate_up_proj"]}
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(network("qwen3_moe", method))}
    assert "experts" in adapted and ("q_proj" in adapted) == bool(targets)
    network("llama", {"type": "lora", "target_modules": "All-Linear"})  # as PEFT reads it


@pytest.mark.parametrize("model", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("experts", [[], ["mlp.experts.gate_up_proj"]])
def test_an_expression_adapts_what_it_matches_and_nothing_else(model: str, experts: list[str]) -> None:
    """PEFT takes it for last names where experts were linear layers, and adapts the layers that it leaves out."""
    expression = r"model\.layers\.1\..*(q|k)_proj"
    method = {"type": "lora", "target_modules": expression, "target_parameters": experts if model != "llama" else []}
    adapted = {name.partition(".lora_")[0] for name in adapter_tensors(network(model, method))}
    alone = {name for name in adapted if not name.endswith("experts")}
    assert alone == {"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"}
    assert (adapted - alone != set()) == bool(method["target_parameters"])


@pytest.mark.parametrize("expression", [r".*\.(w1|w2|w3|q_proj)", r".*layers\.1\.mlp\.gate"])
def test_an_expression_that_names_experts_as_they_were_is_refused_still(expression: str) -> None:
    with pytest.raises(ConfigError, match="takes some of these names for the experts"):
        network("mixtral", {"type": "lora", "target_modules": expression})


@pytest.mark.parametrize("text", ["[q_proj, v_proj]", ' ["q_proj", "v_proj"] ', "[v_proj, q_proj,]"])
def test_text_of_the_form_of_a_list_is_no_expression(text: str) -> None:
    method = settings("llama", {"type": "lora", "target_modules": text}).method
    assert isinstance(method, LoraMethod) and method.target_modules == ["q_proj", "v_proj"]
    for expression in (r"[^.]+\..*[qv]_proj", r".*\.[qv]_proj", r"[a-z]+\.layers\.[01].*[qk]_[a-z]*[^k]"):
        kept = settings("llama", {"type": "lora", "target_modules": expression}).method
        assert isinstance(kept, LoraMethod) and kept.target_modules == expression


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"type": "lora", "target_parameters": ["mlp.experts.down_proj"], "dropout": 0.1}, "method.dropout=0.1 cannot"),
        ({"type": "lora", "target_parameters": ["mlp.experts.down_proj"], "dora": True}, "set method.dora=false"),
        ({"type": "lora", "target_modules": []}, "nothing would be trained"),
        ({"type": "lora", "target_modules": "q_proj("}, "is not a regular expression"),
        ({"type": "freeze", "trained": ["("]}, "is not a regular expression"),
        ({"type": "ia3", "target_modules": ["k_proj"]}, "belong together"),
        ({"type": "ia3", "target_modules": ["k_proj"], "feedforward_modules": ["v_proj"]}, "is not among"),
    ],
)
def test_what_does_not_go_together_is_refused(method: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network("llama", method)


def test_frozen_weights_are_kept_in_the_type_they_are_computed_in() -> None:
    model = network("qwen3", {"type": "lora"}, "bf16")
    store_frozen(model, "bf16")
    types = {p.requires_grad: p.dtype for p in model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied weights stay tied"
    for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64), ("bf16_pure", torch.bfloat16)):
        model = network("qwen3", {"type": "lora"}, precision)
        store_frozen(model, precision)
        assert {p.dtype for p in model.parameters()} == {dtype}


def left_without(model: PreTrainedModel) -> list[str]:
    return sorted(frozen_experts(model).keys() & set(unadapted(model)[0]))


def test_all_linear_leaves_out_the_head_and_experts() -> None:
    model = network("qwen3_moe", {"type": "lora"})
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(model)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert left_without(model) == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert left_without(network("qwen3_moe", {"type": "lora", "target_parameters": both})) == []
    hybrid = left_without(network("granitemoehybrid", {"type": "lora"}))
    assert hybrid == ["block_sparse_moe.experts.down_proj", "block_sparse_moe.experts.gate_up_proj"], "no convolution"
    adapted = {
        name.partition(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(network("gpt2", {"type": "lora"}))
    }
    assert adapted == {"c_attn", "c_proj", "c_fc"}


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [
        (
            "qwen3_moe",
            "all-linear",
            r"the experts get no adapter: .* now \d+ % of the layers' weights",
        ),
        ("llama", ["q_proj"], r"89 % of the layers' weights are in no linear layer and get no adapter \(mlp\."),
        ("llama", "all-linear", ""),
    ],
)
def test_it_is_said_what_share_of_the_weights_gets_no_adapter(
    model: str, targets: str | list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where `all-linear` finds few layers, too, as if the other layers were of another class."""
    method = {"type": "lora", "rank": 2}
    CHECKS[0](settings(model, method), network(model, {**method, "target_modules": targets}), KernelNeeds(), 1)
    assert re.search(said, caplog.text) if said else "no adapter" not in caplog.text


class Held:
    """The weights of a network that has values."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._held = {name: tensor.detach() for name, tensor in network.named_parameters()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._held.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._held[name][start:stop] if self._held[name].ndim else self._held[name]

    def where(self, name: str) -> str:
        return name


@pytest.mark.parametrize("rank", [3, 6])
@pytest.mark.parametrize("width", [4, 24, 32, 100])
def test_adapters_of_experts_are_merged_as_they_compute_whatever_their_width(width: int, rank: int) -> None:
    """Experts narrower than the network, as wide, and wider; with as many ranks as experts (6), and with fewer."""
    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    method = {"type": "lora", "rank": rank, "target_parameters": weights}
    config = settings("qwen3_moe", method, "fp64")
    config.model.overrides.update(moe_intermediate_size=width)
    adapted = network_of(config).to_empty(device="cpu")
    alone = build_base(load_architecture(config.model, None), config.model, "fp64").to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in (adapted, alone):
            module.model.rotary_emb = type(module.model.rotary_emb)(config=module.config)
        for parameter in adapted.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 6)
        base = alone.state_dict() | {
            base_name(name): each for name, each in adapted.named_parameters() if ".lora_" not in name
        }
        alone.load_state_dict(base)
        ids, positions = torch.arange(20)[None] % 50, torch.arange(20)[None]
        before, expected = (logits_of(each, ids, positions) for each in (alone, adapted))
        merged = MergedWeights(Held(alone), Held(adapted), network_of(config))
        alone.load_state_dict(merged.read_all([*merged.shapes()]))
        found = logits_of(alone, ids, positions)
    assert float((before - expected).abs().max()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_routers_are_trained_or_frozen_as_the_method_says() -> None:
    def trained(model: str | dict[str, Any], method: dict[str, Any]) -> tuple[list[str], int]:
        built = network(model, method)
        names = {re.sub(r"^.*\.\d+\.", "", name) for name in adapter_tensors(built)}
        return sorted(name for name in names if re.search(r"\.(gate|router)\.", name)), len(routers_of(built))

    def lora(routers: str | None) -> dict[str, Any]:
        return {"type": "lora", "rank": 2, "routers": routers}

    whole = "mlp.gate.modules_to_save.default"
    assert trained("qwen3_moe", {"type": "full"}) == (["mlp.gate.weight"], 2)
    assert trained("qwen3_moe", {"type": "full", "routers": "frozen"}) == ([], 2)
    assert trained("qwen3_moe", lora(None)) == trained("qwen3_moe", lora("frozen")) == ([], 2)
    # Two, not four: the loss that balances experts is a mean over the layers' routers.
    assert trained("qwen3_moe", lora("trained")) == ([f"{whole}.weight"], 2)
    assert trained(HUNYUAN, lora(None))[0] == [f"mlp.gate.wg.lora_{each}.default.weight" for each in "AB"]
    assert trained(HUNYUAN, lora("frozen"))[0] == []
    assert trained(HUNYUAN, lora("trained"))[0] == [f"{whole}.wg.weight"]
    assert trained("qwen3_moe", {**lora("trained"), "modules_to_save": ["gate"]}) == ([f"{whole}.weight"], 2), (
        "the same"
    )
    for model, method, said in (
        ("llama", lora("trained"), "method.routers: transformers names no module of a LlamaForCausalLM that chooses"),
        ("llama", {"type": "full", "routers": "frozen"}, "method.routers: transformers names no module"),
        (
            HUNYUAN,
            {**lora("frozen"), "target_modules": ["wg"]},
            r"target_modules=\['wg'\] means model\.layers\.0\.mlp\.gate,",
        ),
        *(
            (
                "qwen3_moe",
                {**lora(routers), field: [name]},
                rf"{field}=\['{name}'\] means .*gate, .*{routers} says other",
            )
            for routers, field, name in (
                ("frozen", "modules_to_save", "gate"),
                ("frozen", "modules_to_save", "layers.1.mlp"),
                ("frozen", "target_parameters", "gate.weight"),
                ("trained", "modules_to_save", "layers.1.mlp"),
                ("trained", "target_parameters", "gate.weight"),
            )
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            network(model, method)


def test_all_linear_layers_are_none_that_route() -> None:
    """The routers of Llama 4 are linear layers that return two tensors: with an adapter there it computes nothing."""
    adapted = network("llama4_text", {"type": "lora"})
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(adapted)}
    assert {"q_proj", "o_proj"} <= names and "router" not in names, names


@pytest.mark.parametrize("name", ["falcon_h1", "falcon_mamba", "mamba2", "nemotron_h"])
def test_all_linear_layers_are_none_that_peft_refuses(name: str) -> None:
    """Kernels of Mamba read the weight of its last projection past an adapter."""
    names = {key.partition(".lora_")[0].rpartition(".")[2] for key in adapter_tensors(network(name, {"type": "lora"}))}
    assert "in_proj" in names and "out_proj" not in names, names
    with pytest.raises(ConfigError, match=r"PEFT adapts no 'out_proj' of a .*; its linear layers are called .*in_proj"):
        network(name, {"type": "lora", "target_modules": ["in_proj", "out_proj"]})


@pytest.mark.parametrize(
    "method",
    [
        {"type": "lora", "rank": 4, "alpha": 6, "dora": True, "rank_stabilized": True},
        {"type": "lora", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"type": "lora", "target_modules": r"model\.layers\.1\..*down_proj"},
        {"type": "ia3"},
    ],
)
def test_the_config_for_peft_is_read_back(tmp_path: Path, method: dict[str, Any]) -> None:
    """By our own rules, to the same network; and in the same bytes each time."""
    from raytune_fsdp.model.adapters.attach import attach

    model = network("llama", method)
    put_adapter_config(model, tmp_path)
    first = (tmp_path / "adapter_config.json").read_bytes()
    put_adapter_config(network("llama", method), tmp_path)
    assert (tmp_path / "adapter_config.json").read_bytes() == first
    again = network("llama", {"type": "full"})
    attach(again, adapter_method(tmp_path, stored_names(model).values()))
    assert stored_names(again) == stored_names(model)
    scales = [
        {name: module.scaling for name, module in each.named_modules() if hasattr(module, "scaling")}
        for each in (model, again)
    ]
    assert scales[0] == scales[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "LOHA"}, "adapters of the kind .LOHA. are not known"),
        ({"peft_type": ["LORA"]}, "are not known"),
        ({"peft_type": "LORA", "r": -1}, "is not the config of an adapter"),
        ({"peft_type": "LORA", "r": 4, "target_modules": {"a": 1}}, "is not the config of an adapter"),
        ({"peft_type": "LORA", "r": 4, "target_modules": "("}, "is not the config of an adapter"),
        ({"peft_type": "LORA", "r": 4, "alpha_pattern": {"q_proj": 64}}, "alpha_pattern=.* is not known here"),
        ({"peft_type": "LORA", "r": 4, "init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not known here"),
        ({"peft_type": "LORA", "r": 4, "bias": "all"}, "bias='all' is not known here"),
        (
            {"peft_type": "LORA", "r": 4, "alora_invocation_tokens": [1, 2]},
            "alora_invocation_tokens=.* is not known",
        ),
        ({"peft_type": "LORA", "r": 4, "of_tomorrow": True}, "of_tomorrow=True is not known here"),
        ({"peft_type": "LORA", "r": 4, "target_modules": ["x"] * 5001}, "target_modules has 5,001 names"),
        ({"peft_type": "LORA", "r": 4, "target_modules": ["x" * 2001]}, "or one of more than 2000 characters"),
        ([], "is not a JSON object"),
    ],
)
def test_a_strangers_config_of_an_adapter_is_refused(tmp_path: Path, values: Any, message: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=message):
        adapter_method(tmp_path, [])


def test_a_strangers_expression_is_not_looked_for(tmp_path: Path) -> None:
    """This one would take longer than the universe lasts. What it was found in has tensors."""
    endless = "(.*.*)*(.*.*)*(.*.*)*x"
    values = {"peft_type": "LORA", "r": 4, "target_modules": endless, "target_parameters": ["experts.up"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    held = ["layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "layers.0.experts.lora_A", "layers.1.mlp.up.lora_A"]
    for names in ([f"{name}.default.weight" for name in held], [f"base_model.model.{name}.weight" for name in held]):
        found = adapter_method(tmp_path, names)
        assert isinstance(found, LoraMethod)
        assert found.target_modules == ["layers.0.q_proj", "layers.1.mlp.up"]


def test_the_order_of_names_means_nothing() -> None:
    one, other = (["q_proj", "v_proj"], ["v_proj", "q_proj", "v_proj"])
    assert LoraMethod(type="lora", target_modules=one) == LoraMethod(type="lora", target_modules=other)


def test_an_adapter_begins_alike_whoever_reads_it_and_changes_nothing() -> None:
    model, plain = network("llama", {"type": "lora", "rank": 4, "dora": True}), network("llama", {"type": "full"})
    base = RandomWeights(plain, 3)
    whole, parts = AdaptedWeights(base, model, 7), AdaptedWeights(RandomWeights(plain, 3), model, 7)
    for name, shape in reversed(list(whole.shapes().items())):
        rows = [parts.read(name, row, row + 1) for row in range(shape[0])]
        found = whole.read(name, 0, shape[0])
        assert tuple(found.shape) == tuple(shape)
        assert torch.equal(found, torch.cat(rows)), name
        if base_name(name) != name and ".base_layer." in name:
            assert torch.equal(found, base.read(base_name(name), 0, shape[0]))
        if ".lora_B." in name:
            assert not found.any()
        if ".lora_magnitude_vector." in name:
            weight = base.read(f"{base_name(name.partition('.lora_')[0])}.weight", 0, shape[0])
            assert torch.equal(found, torch.linalg.norm(weight, dim=1))
    name = next(name for name in whole.shapes() if ".lora_A." in name)
    other = AdaptedWeights(base, model, 8).read(name, 0, 4)
    assert not torch.equal(other, whole.read(name, 0, 4)), "by the seed of the run"


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_dora_computes_as_pefts_own(method: str) -> None:
    """Its class is another one, for the compiler; every bit is the same."""
    from peft.tuners.lora.dora import DoraLinearLayer

    model = network("llama", {"type": method, "rank": 4, "dora": True})
    if method == "qlora":
        quantize_layers(model, "int8")
    names = list(model.state_dict())
    model.to_empty(device="cpu")
    init_buffers(model, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.random_(1, 60) if parameter.dtype == torch.uint8 else parameter.normal_(std=0.2)
    results = []
    for _ in range(2):
        model.zero_grad()
        logits = model(input_ids=torch.arange(16)[None], use_cache=False).logits
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        changed = [module for module in model.modules() if isinstance(module, DoraLinearLayer)]
        for module in changed:
            module.__class__ = DoraLinearLayer
    assert changed and len(results[0]) > 3 * len(changed) and results[0][0].isfinite().all()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert list(model.state_dict()) == names


def refused(method: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as failure:
        network("llama", {"type": "lora", **method})
    return str(failure.value)


def test_the_nearest_names_are_those_of_what_is_wrong_each_once() -> None:
    ends = "; its linear layers are called {}".format
    said = refused({"target_modules": ["q_proj", "v_porj", "V_proj", "model.layers.1.self_attn.v_prj"]})
    assert said.startswith("method.target_modules: 'V_proj' is the name of no module")
    said = refused({"target_modules": ["v_porj", "v_prjo"]})
    assert said == (
        "method.target_modules=['v_porj', 'v_prjo']: a LlamaForCausalLM has no such modules"
        + ends(", ".join(LLAMA_LAYERS))
    )
    assert refused({"modules_to_save": ["embedding"]}).endswith(ends(", ".join(LLAMA_LAYERS)))
    said = refused({"target_parameters": ["self_attn.v_porj.weihgt"]})
    assert "; its weights are called " in said and "v_proj.weight" in said, "by the last two parts of both"


@pytest.mark.parametrize("long", ["q_proj" * 1000, "q_proj." * 1000, "\n\x1b[31m" * 1000])
def test_hostile_names_make_no_long_message(long: str) -> None:
    for field in ("target_modules", "target_parameters", "modules_to_save"):
        said = refused({field: [long, *(f"q_prjo{i}" for i in range(100))]})
        assert len(said) < 700 and "\n" not in said and "\x1b" not in said, said
        assert "are called " in said and said.count("q_proj.weight") + said.count(" q_proj") <= 3


def test_a_network_of_many_names_is_not_listed() -> None:
    """2,000 layers, whose names are as long as they like."""
    with torch.device("meta"):
        many: Any = torch.nn.ModuleDict({f"{'layer' * 50}_{i}": torch.nn.Linear(1, 1) for i in range(2000)})
    for asked in ([f"nothing{i}" for i in range(1000)], [f"{'layer' * 30}{i}" for i in range(20)]):
        said = _nearest(many, asked)
        assert said.count("layer" * 50) <= 12 and len(said) < 12 * 300


def test_an_adapter_needs_a_model() -> None:
    from raytune_fsdp.run.base_model import files_of_base

    config = FinetuneConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"init": "random", "architecture": architecture("llama"), "tokenizer": "x"},
            "data": {"train": [{"path": "x"}]},
            "train": {"max_steps": 1, "global_batch": 1},
            "method": LoraMethod(type="lora").model_dump(),
        }
    )
    with pytest.raises(UserError, match=r"model.init=random has none: set model.init=pretrained"):
        files_of_base(config, None)
