"""A network of the user's own: which function may build one, and who may load what was trained with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from raytune_fsdp import finetune
from raytune_fsdp.base.errors import ConfigError, ModelError, ResumeError
from raytune_fsdp.checkpoint.model_files import load_for_inference
from raytune_fsdp.cli import audit, export, generate
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.directory.needed_code import check_trusted
from raytune_fsdp.model.layers import layers_of
from raytune_fsdp.model.network import build_base, load_architecture
from raytune_fsdp.model.own_network import find_network, own_config
from raytune_fsdp.run.checks import check_config
from raytune_fsdp.run.prepare import prepare
from tests.models import save_checkpoint
from tests.own_code import MineConfig, MineForCausalLM
from tests.runs import LLAMA, make_config

CPU = torch.device("cpu")
NAME = "tests.own_code:network"


def llama() -> LlamaConfig:
    return LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"})


def config_of(directory: Path, **sections: Any) -> FinetuneConfig:
    model = {"network": NAME, "init": "random", "architecture": LLAMA, "tokenizer": str(directory / "tokenizer")}
    model |= sections.pop("model", {})
    train = {"global_batch": 4, "micro_batch": 2, "max_steps": 2}
    return make_config(directory, LLAMA, model=model, parallel={"precision": "fp32"}, train=train, **sections)


def test_it_has_a_config_of_its_own_that_names_the_function() -> None:
    config = own_config(NAME, llama())
    assert type(config) is MineConfig and config.network_function == NAME and config.hidden_size == 32
    assert json.loads(config.to_json_string())["network_function"] == NAME
    assert own_config(NAME, config).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "as_it_was",
            r"is transformers' own \(LlamaConfig\), so whoever.*class Config\(LlamaConfig\): model_type = 'my_",
        ),
        ("unregistered", r"write into its module AutoConfig\.register\('nobody_knows', UnknownConfig\)"),
        ("a_layer", r"it returned Linear\(.*must be a transformers\.PreTrainedModel"),
        ("on_a_device", r"it made lm_head\.weight on cpu, must leave the device to the caller"),
        ("more_than_its_class", r"given the config of its network, its class alone does: keep everything that decides"),
        ("failing", r"it raised KeyError: 'width'"),
    ],
)
def test_what_is_no_network_is_refused(function: str, message: str) -> None:
    with pytest.raises(ModelError, match=rf"^model\.network=tests\.own_code:{function}: .*{message}") as caught:
        own_config(f"tests.own_code:{function}", llama())
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^model\.network=tests\.own_code:missing: .* has no function missing"):
        own_config("tests.own_code:missing", llama())


def test_it_is_built_without_memory_in_the_type_of_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, model={"attention": "eager", "overrides": {"rms_norm_eps": 1e-3}})
    hf_config = load_architecture(config.model, None)
    model = build_base(hf_config, config.model, "bf16_pure")
    assert isinstance(model, MineForCausalLM) and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in model.parameters()) and model.config._attn_implementation == "eager"
    assert model.config.rms_norm_eps == 1e-3 and len(layers_of(model)) == 2


@pytest.fixture
def late_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_network.py").write_text(
        "from tests.own_code import network\n"
        "def late(config):\n    import layers_of_mine\n    assert max(getattr(config, 'limits', [0.0])) > -1.0\n"
        "    return layers_of_mine.network(config)\n"
        "def broken(config):\n    if 'late_network' in __import__('sys').argv: return network(config)\n    1 / 0\n"
    )
    (tmp_path / "layers_of_mine.py").write_text("from tests.own_code import network\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late_network", "layers_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("sys.argv", ["late_network"])


def test_a_module_that_it_imports_when_it_is_called_belongs_to_the_run(late_network: None) -> None:
    late = own_config("late_network:late", llama())
    late.limits = (0.0, float("inf"))  # as state mixers have them; JSON writes them otherwise
    found = find_network("late_network:late", late)
    assert "layers_of_mine" in found.modules and found.code


@pytest.mark.slow
def test_what_it_raises_in_a_fresh_process_is_said(late_network: None) -> None:
    mine = own_config("late_network:broken", llama())
    with pytest.raises(
        ModelError, match=r"^model\.network=late_network:broken: in a fresh Python process it raised ZeroDivisionError"
    ):
        find_network("late_network:broken", mine)


def test_adapters_do_not_go_with_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.type=lora with model\.network=.*set method\.type=full or freeze"):
        check_config(config_of(tmp_path, method={"type": "lora"}), 1)


@pytest.mark.parametrize("name", ["os", "a b:c", "..up:f", "losses:f\n\x1b[31m", ":f", "m:"])
def test_a_name_that_is_none_is_not_imported_for_those_who_trust_it(name: str) -> None:
    with pytest.raises(ModelError, match=r"network_function='.*' is no module:function, so nothing is imp") as caught:
        check_trusted({"network_function": name}, "a/config.json", trusted=True)
    assert str(caught.value).isprintable()
    assert check_trusted({"network_function": NAME}, "a/config.json", trusted=True) == NAME


def test_trained_from_a_llama_exported_and_loaded_by_those_who_trust_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_checkpoint(tmp_path / "llama", "llama", tokenizer=True, vocab_size=1024)
    config = config_of(
        tmp_path, model={"init": "pretrained", "architecture": None, "path": str(base), "tokenizer": None},
        export={"at_end": True, "dtype": "fp32"},
    )  # fmt: skip
    result = finetune(config)
    assert result.export is not None
    written = json.loads((result.export / "config.json").read_text())
    assert written["model_type"] == "mine" and written["architectures"] == ["MineForCausalLM"]
    assert written["network_function"] == NAME
    logits = []
    for place in (result.run_dir, result.export):
        with pytest.raises(
            ModelError, match=rf"needs a network of its maker's own.*'{NAME}' builds.*--trust-remote-code"
        ):
            load_for_inference(place, CPU)
        model, _ = load_for_inference(place, CPU, trust_remote_code=True)
        assert isinstance(model, MineForCausalLM)
        with torch.no_grad():
            logits.append(model(torch.arange(8)[None]).logits)
    assert torch.equal(*logits)
    assert generate.main([str(result.export), "w5", "--max-new-tokens", "1"]) == 2
    assert audit.main([str(result.run_dir)]) == 2
    assert NAME in capsys.readouterr().err
    # Begun from what it left: by its own function only.
    later = config_of(tmp_path, model={"init": "pretrained", "architecture": None, "path": str(result.export)})
    assert type(load_architecture(later.model, result.export)) is MineConfig
    with pytest.raises(ModelError, match=rf"needs a network of its maker's own.*set model\.network='{NAME}'"):
        load_architecture(later.model.model_copy(update={"network": None}), result.export)
    with pytest.raises(ResumeError, match=r"model\.network: was '.*', is 'not set'|model\.model_type"):
        other = config.model_copy(update={"model": config.model.model_copy(update={"network": None})})
        prepare(other, 1)
    # Without the code.
    gone = config.model_copy(update={"model": config.model.model_copy(update={"network": "gone_from_here:network"})})
    with pytest.raises(ConfigError, match=r"^model\.network=gone_from_here:network: gone_from_here cannot be imported"):
        prepare(gone, 1)
    for file in (result.run_dir / "model" / "config.json", result.export / "config.json"):
        file.write_text(file.read_text().replace(NAME, "gone_from_here:network"))
    assert export.main([str(result.run_dir), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "'gone_from_here:network' builds, and there is no module 'gone_from_here'" in said
    with pytest.raises(ConfigError, match=r"^model\.network=gone_from_here:network: gone_from_here cannot be imported"):
        load_for_inference(result.export, CPU, trust_remote_code=True)
