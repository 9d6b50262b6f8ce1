"""Adapters are written for the class that the base's own config names, and both namings are read."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.merged import named_class, plain_network, weights_of_adapter
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.model.adapters.attach import adapter_tensors, attach, stored_names
from raytune_fsdp.model.adapters.config_file import put_adapter_config
from raytune_fsdp.model.adapters.names import check_loads
from raytune_fsdp.model.export.adapter import export_adapter
from raytune_fsdp.model.network import build_network, choose_trained, load_architecture
from raytune_fsdp.run.starting_weights import find_adapter
from raytune_fsdp.run.trials.export_proof import check_acts
from tests.models import SEEING_CLASSES, save_checkpoint
from tests.runs import make_config, write_tokenizer

pytest.importorskip("peft")

SLOW = pytest.mark.slow
LORA = {"type": "lora", "rank": 4, "alpha": 8}
ATTENTION = {**LORA, "target_modules": ["q_proj", "v_proj"]}
EXPERTS = {
    "qwen3_5_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "llama4": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    "mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
IA3 = {"type": "ia3", "target_modules": ["k_proj", "v_proj", "o_proj"], "feedforward_modules": ["o_proj"]}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {**ATTENTION, "rank_stabilized": True},
    "linear": LORA,
    "dora": {**ATTENTION, "dora": True},
    "ia3": IA3,
    "expression": {**LORA, "target_modules": r".*layers\.1\..*(k|o)_proj"},
    "whole": {**ATTENTION, "modules_to_save": ["lm_head"]},
    "norms": {**ATTENTION, "modules_to_save": ["norm"]},
    "ia3 by layer": {
        "type": "ia3",
        "target_modules": ["layers.1.self_attn.k_proj", "layers.1.self_attn.o_proj"],
        "feedforward_modules": ["layers.1.self_attn.o_proj"],
    },
    "rows": {**ATTENTION, "train_added_tokens": True},
}
ADDED = (7, 60)


class Held(dict[str, torch.Tensor]):
    """The tensors of an adapter, in memory."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self[name][start:stop]

    def where(self, name: str) -> str:
        return name


def method_of(model: str, kind: str) -> dict[str, Any]:
    if kind == "experts alone":
        return {**LORA, "target_modules": [], "target_parameters": EXPERTS[model]}
    return {**ATTENTION, "target_parameters": EXPERTS[model]} if kind == "experts" else METHODS[kind]


def adapted(home: Path, base: Path, method: Mapping[str, Any]) -> tuple[PreTrainedModel, Held, Path]:
    """A network with adapters of random values beside a base, and what its run would keep of it."""
    files = write_tokenizer(home / "model")
    (files / "config.json").write_text((base / "config.json").read_text())
    network = plain_network(files)
    choose_trained(network, TypeAdapter(Method).validate_python(method), ADDED)
    torch.manual_seed(0)
    held = Held({name: torch.randn(tensor.shape) * 0.1 for name, tensor in adapter_tensors(network).items()})
    for name in held:
        if "vision" in name and (".lora_B." in name or ".ia3_l." in name):  # which no text reaches
            held[name].fill_(1.0 if ".ia3_l." in name else 0.0)
    put_adapter_config(network, files)
    return network, held, files


def exported(home: Path, base: Path, method: Mapping[str, Any]) -> tuple[Held, Path]:
    network, held, files = adapted(home, base, method)
    named = named_class(files, str(base), None)
    place = home / "adapter"
    prove = partial(check_acts, network=network, named=named)
    export_adapter(held, Held(), network, named, files, place, base=str(base), revision=None, card=str, prove=prove)
    return held, place


def ours(base: Path, held: Held, method: Mapping[str, Any]) -> torch.Tensor:
    """The logits of the network that a run trains, with these adapters, in fp64."""
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    choose_trained(network, TypeAdapter(Method).validate_python(method), ADDED)
    with_values = {name: torch.nn.Parameter(tensor.double()) for name, tensor in held.items()}
    network.load_state_dict(with_values, strict=False, assign=True)
    inputs, head = network.get_input_embeddings(), network.get_output_embeddings()
    if hasattr(inputs, "added_rows") and inputs.weight is head.weight:
        head.added_rows = inputs.added_rows
    return logits(network)


def logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([[9, 7, 12, 60, 33, 21, 60, 11, 18, 7, 40, 41]])
    base = getattr(model, "get_base_model", lambda: model)()
    if base._can_set_experts_implementation():
        base.set_experts_implementation("eager")  # torch has no grouped products in fp64
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found


def theirs(base: Path, model: str, place: Path) -> tuple[Any, Any]:
    """The adapter as PEFT loads it into the class that the base's config names, and what PEFT says of its keys."""
    from peft import PeftModel

    name = json.loads((base / "config.json").read_text())["architectures"][0]
    assert model not in SEEING_CLASSES or name == SEEING_CLASSES[model]
    network = getattr(transformers, name).from_pretrained(base, dtype=torch.float64)
    loaded = PeftModel.from_pretrained(network, place, autocast_adapter_dtype=False)
    report = loaded.load_adapter(place, "again")
    loaded.set_adapter("default")
    return loaded, report


QUICK = [
    ("qwen3_5", "linear"),
    ("llama4", "experts"),
    ("qwen3_5_moe", "rows"),
    ("mixtral", "expression"),
]
WIDE = [
    (model, kind)
    for model in ("llama", "qwen3", "qwen3_5_text", "gemma3_text", *SEEING_CLASSES, "mixtral", "gpt_oss")
    for kind in (*METHODS, *(["experts", "experts alone"] if model in EXPERTS else []))
    # A head that is the embedding is not trained apart.
    if (model, kind) not in QUICK and not (kind == "whole" and model in ("qwen3", "gemma3", "gemma3_text"))
]


@pytest.mark.parametrize(("model", "kind"), [*QUICK, *(pytest.param(*each, marks=SLOW) for each in WIDE)])
def test_peft_on_the_class_that_the_base_names_computes_what_the_run_does(
    tmp_path: Path, model: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "raytune_fsdp.run.trials.export_proof")
    base, method = save_checkpoint(tmp_path / "base", model), method_of(model, kind)
    held, place = exported(tmp_path, base, method)
    assert "no small network" not in caplog.text, "the export was proven to act"
    found, report = theirs(base, model, place)
    assert not report.missing_keys and not report.unexpected_keys, report
    adapters = [name for name, _ in found.named_parameters() if ".default" in name]
    assert adapters and not any("vis" in name for name in adapters), "no part that sees has one"
    if kind == "expression":
        assert all(re.search(r"layers\.1\..*[ko]_proj", name) for name in adapters), adapters
    wanted = ours(base, held, method)
    with found.disable_adapter():
        assert (logits(found) - wanted).abs().max() > 1e-4, "the adapter acts"
    assert (logits(found) - wanted).abs().max() <= 1e-6


def _merged(place: Path) -> dict[str, torch.Tensor]:
    weights, _ = weights_of_adapter(place, None)
    return weights.read_all(list(weights.shapes()))


def _as_older_versions_wrote_it(network: PreTrainedModel, held: Held, place: Path, older: Path) -> Path:
    older.mkdir()
    save_file({key: held[name] for name, key in stored_names(network).items()}, older / "adapter_model.safetensors")
    values = json.loads((place / "adapter_config.json").read_text())
    put_adapter_config(network, older, base_model_name_or_path=values["base_model_name_or_path"])
    return older


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("qwen3_5", "linear"),
        pytest.param("qwen3_5", "expression", marks=SLOW),
        ("llama4", "whole"),
        pytest.param("qwen3_5", "ia3", marks=SLOW),
        pytest.param("qwen3_5_moe", "experts", marks=SLOW),
    ],
)
def test_an_adapter_is_read_under_the_older_names_too(tmp_path: Path, model: str, kind: str) -> None:
    """By `generate`, `eval` and `--merge`, and by a run that begins with it."""
    base, method = save_checkpoint(tmp_path / "base", model), method_of(model, kind)
    held, place = exported(tmp_path, base, method)
    network = plain_network(base)
    attach(network, TypeAdapter(Method).validate_python(method))
    older = _as_older_versions_wrote_it(network, held, place, tmp_path / "older")
    keys = [set(load_file(each / "adapter_model.safetensors")) for each in (place, older)]
    assert keys[0].isdisjoint(keys[1]), "they are other names"
    merged, plain = _merged(place), _merged(older)
    assert merged.keys() == plain.keys() and all(torch.equal(merged[name], plain[name]) for name in merged)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    assert merged.keys() == before.keys() and any(not torch.equal(merged[name], before[name]) for name in merged)
    for each in (place, older):
        found = _begun_with(tmp_path, base, method, each)
        assert {name: found.read(name, 0, len(held[name])).tolist() for name in held} == {
            name: tensor.tolist() for name, tensor in held.items()
        }


def _begun_with(home: Path, base: Path, method: Mapping[str, Any], adapter: Path) -> Any:
    model = {"path": str(base), "init": "pretrained", "architecture": None, "tokenizer": str(home / "model")}
    config = make_config(home, model=model, method={**method, "adapter": str(adapter)})
    found = find_adapter(config, build_network(load_architecture(config.model, base), config), base)
    assert found is not None
    return found.weights()


def test_an_adapter_of_the_whole_class_leaves_the_tower_as_it_begins(tmp_path: Path) -> None:
    """Of a Gemma 3 the run has adapters in the tower, which nothing trains and the export leaves out."""
    base = save_checkpoint(tmp_path / "base", "gemma3")
    held, place = exported(tmp_path, base, LORA)
    found = _begun_with(tmp_path, base, LORA, place).shapes()
    left = [name for name in held if name not in found]
    assert left and all("vision_tower" in name for name in left)
    assert not any("vision" in key for key in load_file(place / "adapter_model.safetensors"))
    merged, stored = _merged(place), load_file(base / "model.safetensors")
    towers = [name for name in merged if "vision_tower" in name]
    assert towers and all(torch.equal(merged[name], stored[name.removeprefix("model.")]) for name in towers)


def test_an_adapter_of_a_tower_that_does_something_is_kept(tmp_path: Path) -> None:
    """One that a run began with, and that somebody else has trained with images."""
    base = save_checkpoint(tmp_path / "base", "gemma3")
    network, held, files = adapted(tmp_path, base, LORA)
    next(tensor for name, tensor in held.items() if "vision" in name and ".lora_B." in name).fill_(0.5)
    named, place = named_class(files, str(base), None), tmp_path / "adapter"
    prove = partial(check_acts, network=network, named=named)
    export_adapter(held, Held(), network, named, files, place, base=str(base), revision=None, card=str, prove=prove)
    assert load_file(place / "adapter_model.safetensors").keys() == set(stored_names(network).values())
    found = _begun_with(tmp_path, base, LORA, place)
    assert found.shapes() == held.shapes()


def test_an_adapter_that_peft_would_not_load_is_not_exported(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", "qwen3_5")
    held, place = exported(tmp_path, base, ATTENTION)
    named = named_class(base, str(base), None)
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(place / "adapter_model.safetensors").items()}
    check_loads(place, named, shapes)
    older = {key.replace("model.language_model.", "model."): shape for key, shape in shapes.items()}
    wide = {key: (*shape[:-1], shape[-1] + 1) for key, shape in shapes.items()}
    for wrong in (older, wide, dict(list(shapes.items())[1:])):
        with pytest.raises(ModelError, match="PEFT cannot load this adapter into a Qwen3_5ForConditionalGeneration"):
            check_loads(place, named, wrong)


def test_an_adapter_that_does_something_else_is_not_exported(tmp_path: Path) -> None:
    """On a small network: here with another scale than the run's, and with targets that leave layers out."""
    base = save_checkpoint(tmp_path / "base", "qwen3_5")
    network, held, files = adapted(tmp_path, base, ATTENTION)
    named = named_class(files, str(base), None)
    prove = partial(check_acts, network=network, named=named)
    place = tmp_path / "adapter"
    export_adapter(held, Held(), network, named, files, place, base=str(base), revision=None, card=str, prove=prove)
    values = json.loads((place / "adapter_config.json").read_text())
    for wrong in ({"use_rslora": True}, {"target_modules": ["model.language_model.layers.1.self_attn.q_proj"]}):
        (place / "adapter_config.json").write_text(json.dumps({**values, **wrong}))
        with pytest.raises(
            ModelError, match="changes the logits of a small Qwen3_5ForConditionalGeneration, the class"
        ):
            prove(place)


def test_a_base_whose_config_names_the_text_class_is_taken_at_its_word(tmp_path: Path) -> None:
    """Older exports are so: the config of the whole, with the text class and its tensors. The run is not asked for
    more, and the adapter has the names of that class."""
    from peft import PeftModel

    whole = save_checkpoint(tmp_path / "whole", "qwen3_5")
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    save_file({key.replace("language_model.", ""): t for key, t in stored.items()}, base / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3_5ForCausalLM"]}))
    held, place = exported(tmp_path, base, ATTENTION)
    assert all("language_model" not in key for key in load_file(place / "adapter_model.safetensors"))
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    found = PeftModel.from_pretrained(network, place, autocast_adapter_dtype=False)
    assert (logits(found) - ours(base, held, ATTENTION)).abs().max() <= 1e-6


def test_a_class_that_cannot_be_built_here_ends_no_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its tower may need a package that is not installed. The adapter is then written for the class that was trained,
    one line says what that means, and it is read here."""
    from peft import PeftModel

    base = save_checkpoint(tmp_path / "base", "qwen3_5")
    config = json.loads((base / "config.json").read_text())
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    (base / "config.json").write_text(
        json.dumps({**config, "vision_config": {**config["vision_config"], "hidden_act": "of another package"}})
    )
    held, place = exported(tmp_path, base, ATTENTION)
    (line,) = [each.message for each in caplog.records if "cannot be built here" in each.message]
    assert "a Qwen3_5ForConditionalGeneration, the class" in line and "names of a Qwen3_5ForCausalLM" in line
    assert "\n" not in line and "merge it" in line
    assert not any("language_model" in key for key in load_file(place / "adapter_model.safetensors"))
    found = PeftModel.from_pretrained(whole, place, autocast_adapter_dtype=False)
    assert (logits(found) - ours(base, held, ATTENTION)).abs().max() <= 1e-6
    assert _merged(place)


def test_mistral_3_is_refused_by_name(tmp_path: Path) -> None:
    """transformers has no class for its language model alone."""
    base = save_checkpoint(tmp_path / "base", "llama")
    config = {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral"},
    }
    (base / "config.json").write_text(json.dumps(config))
    chosen = make_config(tmp_path, model={"path": str(base), "init": "pretrained", "architecture": None})
    with pytest.raises(ModelError, match="cannot build a causal LM of type 'mistral3'"):
        build_network(load_architecture(chosen.model, base), chosen)
