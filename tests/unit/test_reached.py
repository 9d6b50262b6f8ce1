"""Adapters are where the network computes with them: each is trained, and none is on a layer that is read past."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.adapters.attach import ADAPTER, adapted_modules, adapter_tensors
from raytune_fsdp.model.adapters.targets import _READ_PAST, _linear_names
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.run.network_checks import check_reached
from raytune_fsdp.run.trials.probe import fill_small
from tests.models import EXPERTS, HYBRIDS, LINEAR, PARTICULAR, architecture
from tests.unit.test_probe import wanted

pytest.importorskip("peft")

MIXTURES_AND_HYBRIDS = [*EXPERTS, *PARTICULAR, *LINEAR, *HYBRIDS, "olmo_hybrid", "falcon_h1", "llama4_text"]
"""Without Zamba, whose layers share weights, so that all-linear is refused."""


def config_of(name: str, **method: Any) -> FinetuneConfig:
    config = wanted(architecture(name), precision="fp32", attention="eager").model_dump()
    return FinetuneConfig.model_validate({**config, "method": {"type": "lora", **method}})


def network(config: FinetuneConfig, adapted: list[str] | None = None) -> Any:
    return build_network(load_architecture(config.model, None), config, adapted=adapted)


@pytest.mark.parametrize("name", MIXTURES_AND_HYBRIDS)
def test_every_adapter_of_all_linear_layers_is_trained(name: str) -> None:
    """Both of its matrices, as where they begin as a part of the weight."""
    model = network(config_of(name))
    fill_small(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model(input_ids=torch.arange(5, 21)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    tensors = adapter_tensors(model)
    assert tensors and not [name for name, each in tensors.items() if each.grad is None or not each.grad.any()]


READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|data|shape)\b)")
CALLED = {
    "BloomAttention": {"dense"},  # read with slow_but_exact only, which no stored model has
    "BloomMLP": {"dense_4h_to_h"},
    "TDNNLayer": {"kernel"},  # of encoders of speech
    "Gemma3nTextAltUp": {"correction_coefs"},  # limited in place, then called
    "Gemma4AssistantForCausalLM": {"lm_head"},
    "Gemma4UnifiedAssistantForCausalLM": {"lm_head"},
    "LSHSelfAttention": {"value", "query_key"},  # read while a text is generated
}
"""Layers that are called in training, although their weight is read elsewhere."""


def test_the_layers_that_are_read_past_are_those_of_transformers() -> None:
    """Also where only kernels read them, which are not here."""
    root = Path(transformers.__file__).parent / "models"
    folders = {model_type_to_module_name(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    found: dict[str, set[str]] = {}
    for file in (file for folder in folders for file in (root / folder).glob("modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        for part in re.split(r"^class ", text, flags=re.MULTILINE)[1:] if READ.search(text) else ():
            linear = set(re.findall(r"self\.(\w+) = (?:torch\.)?nn\.Linear\(", part))
            methods = re.split(r"^    def ", part, flags=re.MULTILINE)[1:]
            running = [method for method in methods if not re.match(r"_*(?:init|tie)", method)]
            if names := linear & {name for method in running for name in READ.findall(method)}:
                found[re.split(r"\W", part)[0]] = names
    known = {**{owner: {*layers} for owner, layers in _READ_PAST.items()}, **CALLED}
    assert "MambaMixer" in found
    assert not {owner: names for owner, names in found.items() if not names <= known.get(owner, set())}


@pytest.mark.parametrize(
    ("name", "asked", "layer"),
    [
        ("jamba", {"target_modules": ["dt_proj", "in_proj"]}, "dt_proj"),
        ("falcon_mamba", {"target_modules": ["x_proj"]}, "x_proj"),
        ("bamba", {"target_modules": r".*mamba\.(in|out)_proj"}, "out_proj"),
        ("granitemoehybrid", {"target_modules": ["in_proj", "mamba.out_proj"]}, "out_proj"),
        ("jamba", {"target_parameters": ["dt_proj.weight"]}, "dt_proj"),
        ("jamba", {"type": "ia3", "target_modules": ["dt_proj"], "feedforward_modules": []}, "dt_proj"),
    ],
)
def test_a_layer_that_is_read_past_is_refused_by_name_where_it_is_asked_for(
    name: str, asked: dict[str, Any], layer: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(name, **asked)
    model = network(config)
    field = "target_parameters" if "target_parameters" in asked else "target_modules"
    way_out = rf"leave {layer} out{'' if 'type' in asked else ', as target_modules=all-linear does'}$"
    with pytest.raises(ConfigError, match=rf"^method\.{field}=.* adapts {layer} of a .*; {way_out}"):
        check_reached(config, model, None)
    assert not caplog.text
    check_reached(config, model, adapted_modules(adapter_tensors(model)))  # a run that goes on
    assert f"the adapters of {layer} stay as they began" in caplog.text


def test_whoever_begins_with_an_adapter_of_such_layers_keeps_it() -> None:
    config = config_of("jamba", target_modules=["dt_proj", "in_proj"], adapter="somewhere")
    check_reached(config, network(config), None)


def test_all_linear_layers_of_a_run_that_goes_on_are_those_it_has(caplog: pytest.LogCaptureFixture) -> None:
    older = config_of("jamba", target_modules=["dt_proj", "in_proj", "q_proj"])
    held = adapted_modules(adapter_tensors(network(older)))
    config = config_of("jamba", init="olora")
    again = network(config, held)
    assert adapted_modules(adapter_tensors(again)) == held
    assert again.peft_config[ADAPTER].target_modules == {"dt_proj", "in_proj", "q_proj"}, "as it wrote them"
    check_reached(config, again, held)
    assert "method.init=olora: the network is without the part of these weights" in caplog.text


@pytest.mark.parametrize("name", ["jamba", "qwen3_moe", "granitemoehybrid", "llama4_text"])
def test_all_linear_layers_are_the_same_when_a_run_goes_on(name: str) -> None:
    config = config_of(name)
    fresh = network(config)
    again = network(config, adapted_modules(adapter_tensors(fresh)))
    assert [*adapter_tensors(again)] == [*adapter_tensors(fresh)]
    assert again.peft_config[ADAPTER].target_modules == fresh.peft_config[ADAPTER].target_modules


def test_what_is_left_out_takes_no_layer_of_the_same_name_along() -> None:
    """Gemma 4's router has a layer `proj`."""
    changes = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    config = wanted(architecture("gemma4_text", **changes), precision="fp32")
    model = build_network(load_architecture(config.model, None), config)
    routers = [f"model.layers.{at}.router" for at in range(4)]
    assert "proj" in _linear_names(model, []) and "proj" not in _linear_names(model, routers)
    with torch.device("meta"):
        model.model.layers[1].self_attn.proj = nn.Linear(32, 32)
    found = _linear_names(model, routers)
    assert "self_attn.proj" in found and "proj" not in found and "q_proj" in found
