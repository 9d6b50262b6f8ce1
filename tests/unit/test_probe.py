"""What would fail in the first step is refused before a rank starts, and nothing else is."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.checkpoint.model_files import load_for_inference
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelNeeds, choose
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.run.checks import check_first
from raytune_fsdp.run.network_checks import check_network
from raytune_fsdp.run.trials import probe
from raytune_fsdp.run.trials.needs import network_needs
from raytune_fsdp.run.trials.probe import check_step
from tests.models import (
    ARCHITECTURES,
    EXPERTS,
    PARTICULAR,
    REARRANGED,
    UNUSUAL,
    add_tokenizer,
    architecture,
    build,
)

LARGE = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


def wanted(
    values: dict[str, Any],
    *,
    packing: str = "none",
    device: str = "cpu",
    seq_len: int = 64,
    precision: str = "bf16",
    **model: Any,
) -> FinetuneConfig:
    return FinetuneConfig.model_validate(
        {
            "run": {"name": "probe", "storage": "/tmp"},
            "model": {"init": "random", "architecture": values, "tokenizer": "none", **model},
            "data": {"train": [{"path": "none"}], "seq_len": seq_len, "packing": packing},
            "parallel": {"precision": precision},
            "train": {"global_batch": 1, "micro_batch": 1, "max_steps": 1},
            "cluster": {"device": device, "launch": "local"},
        }
    )


def check(values: dict[str, Any], **options: Any) -> KernelNeeds:
    config = wanted(values, **options)
    hf_config = load_architecture(config.model, None)
    network = build_network(hf_config, config)
    needs = network_needs(config, hf_config, network)
    check_step(config, hf_config, network, needs)
    return needs


SOME = {"llama", "gemma3_text", "gpt2", *EXPERTS, *REARRANGED, "deepseek_v3", "llama4_text", "falcon_h1", "mpt"}
"""What differs from the others in what is tried: attention, experts, biases, mixers. All others are slow."""


def some_first(*names: str) -> list[Any]:
    return [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some_first(*ARCHITECTURES, *EXPERTS, *REARRANGED, *PARTICULAR, *UNUSUAL))
def test_no_architecture_that_trains_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, probe.__name__):
        needs = check(architecture(name))
    assert not caplog.messages, "the step was not really tried"
    assert needs.eager is None, "sdpa is as good as eager attention for all that have it"


@pytest.mark.parametrize("name", some_first(*EXPERTS, *PARTICULAR, "llama4_text"))
def test_a_step_of_experts_in_fp64_is_really_tried(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """For float64 torch has no grouped products, which are transformers' own choice."""
    with caplog.at_level(logging.DEBUG, probe.__name__):
        check(architecture(name), precision="fp64")
    assert not caplog.messages, "the step was not really tried"


@pytest.mark.parametrize("name", EXPERTS)
def test_a_model_of_experts_in_fp64_is_asked(name: str, tmp_path: Path) -> None:
    ids, logits = torch.arange(9)[None], {}
    for dtype in (torch.float32, torch.float64):
        build(name).to(dtype).save_pretrained(tmp_path / str(dtype))
        add_tokenizer(tmp_path / str(dtype))
        model, _ = load_for_inference(tmp_path / str(dtype), torch.device("cpu"))
        logits[dtype] = model(input_ids=ids).logits
        assert logits[dtype].dtype == dtype
    torch.testing.assert_close(logits[torch.float32].double(), logits[torch.float64], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_overrides_that_only_a_forward_pass_refuses(large: bool) -> None:
    """At full width too, where only the shapes are computed: half of the network would take 20 GB."""
    values = {"model_type": "llama", **LARGE} if large else architecture("llama")
    with pytest.raises(ModelError) as refused:
        check(values, overrides={"head_dim": 7})
    line = str(refused.value)
    assert line.startswith("model.overrides (head_dim=7): the first step of a LlamaForCausalLM fails: ")
    assert "\n" not in line
    check(values)


def test_an_override_of_what_differs_by_layer_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"^model\.overrides\.head_dim: it is not the same in all layers of a 'gemma4_text'"
    ):
        check(architecture("gemma4_text"), overrides={"head_dim": 8})


def test_an_architecture_whose_sizes_do_not_fit_is_named() -> None:
    reason = (
        r"^model\.architecture \(deepseek_v3\): the first step of a DeepseekV3ForCausalLM fails: RuntimeError: The size"
    )
    with pytest.raises(ModelError, match=reason):
        check(architecture("deepseek_v3", num_key_value_heads=2))


def test_packing_that_leaks_is_refused_before_a_rank_starts() -> None:
    """The convolution of a RecurrentGemma runs on, and gets the mask of pairs as attention does."""
    values = {
        **architecture("llama", head_dim=8), "model_type": "recurrent_gemma", "lru_width": 32,
        "block_types": ["recurrent", "attention"], "attention_window_size": 16,
    }  # fmt: skip
    leaks = r"data\.packing=best_fit: in RecurrentGemmaForCausalLM .* set data\.packing=none"
    with pytest.raises(ConfigError, match=leaks):
        check(values, packing="best_fit")
    check(values)


_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
BY_LENGTH: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 24},
    "llama4_text": {"floor_scale": 24, "attn_scale": 9.0, "no_rope_layers": [0, 1]},
}
"""Networks that compute a document otherwise beside others, and how: each from about 24 tokens on."""


@pytest.mark.parametrize("name", BY_LENGTH)
def test_where_neighbours_matter_a_new_run_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def change(**values: Any) -> float:
        """How far a document's logits are from those of it alone, behind another one of 30 tokens."""
        model, places = build(name, **values), torch.cat([torch.arange(30), torch.arange(8)])[None]
        model.set_attn_implementation("eager")
        with torch.no_grad():
            packed = model(input_ids=torch.arange(38)[None], position_ids=places, use_cache=False).logits[0, 30:]
            alone = model(input_ids=torch.arange(30, 38)[None], use_cache=False).logits[0]
        return float((packed - alone).abs().max() / alone.abs().max())

    assert change(**BY_LENGTH[name]) > 1e-4 > 1e-5 > change()

    def asked(*, seq_len: int, many: int, packing: str = "best_fit", begins: bool = True) -> None:
        config = wanted(architecture(name, **BY_LENGTH[name]), seq_len=seq_len, packing=packing)
        train = config.train.model_copy(update={"global_batch": many, "micro_batch": many})
        config = config.model_copy(update={"train": train})
        network = build_network(load_architecture(config.model, None), config)
        check_network(config, network, KernelNeeds(), 1, begins=begins)

    with pytest.raises(ConfigError, match=r"depend on its neighbours; set .* or data\.packing=none with"):
        asked(seq_len=25, many=1)
    asked(seq_len=12, many=1)
    asked(seq_len=25, many=1, packing="none")
    with pytest.raises(ConfigError, match="depend on its neighbours"):
        asked(seq_len=25, many=2, packing="none")
    if name == "llama4_text":  # its rows are micro-batches
        with pytest.raises(ConfigError, match="data.seq_len=12 with train.micro_batch=2: .* token 24 of a row"):
            asked(seq_len=12, many=2)
    asked(seq_len=25, many=1, begins=False)
    assert "depend on its neighbours" in caplog.text and "goes on as it began" in caplog.text


@pytest.mark.slow
def test_mixers_of_a_large_network_are_split() -> None:
    """It is shrunk to be tried."""
    assert check({"model_type": "zamba"}, packing="best_fit").mixers == ("ZambaMambaMixer",)


@pytest.mark.parametrize("error", [MemoryError("2 GB"), torch.OutOfMemoryError("2 GB"), ImportError("no kernels")])
def test_a_failure_of_the_probe_lets_the_run_go_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(probe, "_forward_and_backward", fails)
    with caplog.at_level(logging.DEBUG, probe.__name__):
        check(architecture("llama"))
    (message,) = caplog.messages
    assert str(error) in message


def test_kernels_that_a_cpu_lacks_say_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("not implemented on CPU")

    monkeypatch.setattr(probe, "_forward_and_backward", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(architecture("llama"), device="cuda")
    with pytest.raises(ModelError, match="not implemented on CPU"):
        check(architecture("llama"))


def test_an_sdpa_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No document leaks where the scale of the scores is lost, and no shape is wrong."""
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def without_scale(*arguments: Any, scaling: float | None = None, **more: Any) -> Any:
        return right(*arguments, **more)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", without_scale)
    # The scale of Llama is the default; Granite's is its own.
    assert check(architecture("llama")).eager is None
    values = {**architecture("llama"), "model_type": "granite", "attention_multiplier": 0.9}
    needs = replace(check(values), refused="it does not pass them on")

    def chosen(asked: str, kept: str | None = None) -> str:
        return choose(
            asked, needs, kept=kept, device=torch.device("cpu"), dtype=torch.float32, fails=lambda _: None
        ).name

    assert chosen("auto") == "eager" and chosen("auto", kept="sdpa") == "sdpa"
    assert chosen("eager") == "eager" and chosen("sdpa", kept="sdpa") == "sdpa"
    with pytest.raises(ConfigError, match=r"^model\.attention=sdpa: transformers' sdpa .* set model\.attention=auto$"):
        chosen("sdpa")


@pytest.mark.parametrize(("attention", "instead"), [("flex_attention", "sdpa"), ("flash_attention_2", "auto")])
def test_attention_that_needs_a_gpu_is_refused_on_a_cpu(tmp_path: Path, attention: str, instead: str) -> None:
    config = wanted(architecture("llama"), attention=attention)
    with pytest.raises(ConfigError, match=rf"model\.attention={attention} on a CPU.* set model\.attention={instead}"):
        check_first(config, 1)
    run = config.run.model_copy(update={"storage": str(tmp_path)})
    check_first(wanted(architecture("llama"), attention=attention, device="cuda").model_copy(update={"run": run}), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for nodes without a GPU")
def test_flash_attention_is_prepared_for_where_there_is_no_gpu() -> None:
    """As on the head of a cluster; what is chosen for the ranks are the kernels of the same name."""
    needs = check(architecture("llama"), attention="flash_attention_2", device="cuda", packing="best_fit")
    gpu, dtype = torch.device("cuda"), torch.bfloat16
    found = choose("flash_attention_2", needs, kept=None, device=gpu, dtype=dtype, fails=lambda name: None)
    assert found.name == "documents_fa2"
    check(architecture("llama") | {"attn_implementation": "flash_attention_2"})
    with pytest.raises(ModelError, match=r"model\.attention=flash_attention_2: bloom has none"):
        check(architecture("bloom"), attention="flash_attention_2", device="cuda")
