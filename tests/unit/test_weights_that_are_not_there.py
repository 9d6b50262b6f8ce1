"""What a model directory lacks, which transformers draws at random, is refused by whoever asks the model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.model_files import load_for_inference
from raytune_fsdp.cli.main import main
from raytune_fsdp.model.directory.files import find_weights
from tests.models import (
    ARCHITECTURES,
    EXPERTS,
    PARTICULAR,
    REARRANGED,
    ROTATED,
    SCALED,
    UNUSUAL,
    add_tokenizer,
    architecture,
    build,
    save_checkpoint,
)
from tests.quantized import save_fp8, save_mxfp4, write

CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]


def weights_of(directory: Path) -> Tensors:
    return {key: each for name in find_weights(directory).sizes() for key, each in load_file(directory / name).items()}


def change(directory: Path, changed: Callable[[Tensors], Tensors]) -> Path:
    """Put other weights into a directory."""
    config = json.loads((directory / "config.json").read_text())
    tensors = changed(weights_of(directory))
    if "quantization_config" in config:
        write(directory, tensors, config["quantization_config"])
    else:
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def without(*words: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: each for key, each in tensors.items() if not any(word in key for word in words)}


def refusal(directory: Path) -> str:
    add_tokenizer(directory)
    with pytest.raises(ModelError) as failure:
        load_for_inference(directory, CPU)
    assert "\n" not in str(failure.value)
    return str(failure.value)


def asked(command: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    """Exit code, output and lines of errors of a command that asks the model in a directory."""
    rows = directory / "rows.jsonl"
    rows.write_text('{"text": "some words to measure"}\n')
    dataset = {"path": str(rows), "format": {"type": "completion"}}
    flags = {"generate": ["hello", "--max-new-tokens", "4"], "chat": []}
    flags["eval"] = ["--config", str(directory / "data.yaml")]
    (directory / "data.yaml").write_text(
        json.dumps(
            {
                "run": {"name": "measured"},
                "model": {"path": str(directory)},
                "data": {"train": [dataset], "eval": [dataset], "seq_len": 64},
                "train": {"max_steps": 1, "global_batch": 1},
            }
        )
    )
    capsys.readouterr()
    code = main([command, str(directory), *flags[command]])
    found = capsys.readouterr()
    # The bar is not hidden in a process that has imported the hub's library before.
    return code, found.out, [line for line in found.err.splitlines() if line and "Loading weights" not in line]


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said since the last call. Where nobody listens to the log, as in a user's process, it is printed."""
    said = [record.getMessage() for record in caplog.records if record.name.startswith("raytune_fsdp")]
    caplog.clear()
    return said


@pytest.mark.parametrize("command", ["generate", "eval", "chat"])
def test_a_head_and_a_layer_that_are_missing_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    directory = save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    change(directory, without("lm_head", "layers.1."))
    code, out, lines = asked(command, directory, capsys)
    assert (code, out, len(lines)) == (2, "", 1), lines
    (line,) = lines
    assert "10 missing (lm_head.weight, model.layers.1.input_layernorm.weight, " in line and str(directory) in line
    assert "a part of one? Download it again, or export it again" in line


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    directory, other = save_checkpoint(tmp_path / "model", "llama"), save_checkpoint(tmp_path / "other", "gpt2")
    shutil.copy(other / "model.safetensors", directory)
    message = refusal(directory)
    assert "do not fit a LlamaForCausalLM (llama): 21 missing (lm_head.weight, " in message
    assert "28 unknown (" in message and "transformer.h.0." in message


def test_a_tied_weight_that_is_missing_under_both_names_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3")
    assert "2 missing (lm_head.weight, model.embed_tokens.weight)" in refusal(change(tmp_path, without("embed_tokens")))


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    change(tmp_path, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(131, 16)})
    assert "lm_head.weight is [131, 16] in the files and [131, 32] in the network" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["experts.4."], "model.layers.0.mlp.experts.down_proj is [4, 32, 64] in the files and [5, 32, 64]"),
        (["experts.1.w2"], "model.layers.0.mlp.experts.down_proj is [4, 32, 64] in the files and [5, 32, 64]"),
        (["0.block_sparse_moe.experts.1.w1"], "experts.2.w1.weight comes after model.layers.0.block_sparse_moe.exp"),
        (["experts.4.w1"], "cannot convert model.layers.0.mlp.experts.gate_up_proj of mixtral"),
        (["1.block_sparse_moe.experts"], "2 missing (model.layers.1.mlp.experts.down_proj, "),
    ],
)
def test_experts_that_are_missing_are_named(tmp_path: Path, words: list[str], expected: str) -> None:
    save_checkpoint(tmp_path, "mixtral")
    assert expected in refusal(change(tmp_path, without(*words)))


@pytest.mark.parametrize(
    ("kind", "word", "expected"),
    [
        ("fp8", "layers.0.mlp.up_proj.weight_scale_inv", "0.mlp.up_proj.weight in {}/model-00001-of-00002.safetensors"),
        ("fp8", "layers.0.mlp.up_proj.weight_scale_inv", "is float8_e4m3fn and has no scales"),
        ("mxfp4", "layers.0.mlp.experts.down_proj_scales", "of no use without model.layers.0.mlp.experts.down_proj_sc"),
        ("mxfp4", "layers.0.mlp.experts.down_proj_", "1 missing (model.layers.0.mlp.experts.down_proj)"),
    ],
)
def test_quantized_weights_that_lack_a_part_are_refused(tmp_path: Path, kind: str, word: str, expected: str) -> None:
    if kind == "fp8":
        save_fp8(tmp_path, "llama", (16, 16))
    else:
        save_mxfp4(tmp_path)
    change(tmp_path, lambda tensors: {key: each for key, each in tensors.items() if word not in key or "bias" in key})
    assert expected.format(tmp_path) in refusal(tmp_path)


def test_what_a_layer_of_the_network_has_no_place_for_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    change(tmp_path, lambda tensors: {**tensors, **bias})
    assert "none missing; 1 unknown (model.layers.0.self_attn.q_proj.bias)" in refusal(tmp_path)
    bias = {"model.norm.bias": torch.zeros(32)}
    change(tmp_path, lambda tensors: {**without("q_proj.bias")(tensors), **bias})
    assert "none missing; 1 unknown (model.norm.bias)" in refusal(tmp_path)


def test_what_no_layer_of_the_network_has_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    right = asked("generate", directory, capsys)
    assert right[0] == 0 and not notes(caplog)
    further = {"mtp.fc.weight": torch.zeros(2, 2), "score.\x1b[2J": torch.zeros(2)}
    change(directory, lambda tensors: {**tensors, **further})
    assert asked("generate", directory, capsys) == right
    (line,) = notes(caplog)
    assert line == (
        f"{directory}: not read, as no layer of a LlamaForCausalLM has them: mtp.fc.weight, score.\N{MIDDLE DOT}[2J"
    )
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}  # of old checkpoints: nothing to say
    change(directory, lambda tensors: {**without("mtp", "score")(tensors), **buffer})
    assert asked("generate", directory, capsys) == right and not notes(caplog)


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "ours"

class Model(LlamaForCausalLM):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.further = torch.nn.Linear(3, 5, bias=False)
        self.post_init()
"""


def test_a_checkpoint_without_a_tensor_that_code_asks_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tensors there are is known only when the code has run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", list(sys.path))
    older = Path(__file__).parents[1] / "fixtures" / "aae7294" / "runs" / "steps"
    run = Path(shutil.copytree(older, tmp_path / "run"))
    (run / "model" / "ours.py").write_text(CODE)
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"
    auto_map = {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"}
    (run / "model" / "config.json").write_text(json.dumps({**config, "model_type": "ours", "auto_map": auto_map}))
    with pytest.raises(ModelError, match=r"config\.json: further\.weight differs$"):
        load_for_inference(run, CPU, trust_remote_code=True)


# --- None is refused -------------------------------------------------------------------------------------------------

_TEXT = {k: v for k, v in architecture("llama").items() if k not in ("model_type", "tie_word_embeddings")}
_DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
SEEING: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {**_TEXT, **_DELTA}, "vision_config": _QWEN_TOWER},
    "qwen3_5_moe": {"text_config": {**_TEXT, **_DELTA, **_EXPERTS}, "vision_config": _QWEN_TOWER},
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
    },
    "llama4": {
        "text_config": {
            **_TEXT, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1, "attention_chunk_size": 64,
        },
        "vision_config": {**_TOWER, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    },
}  # fmt: skip
"""Configs of models that also see."""


def save_seeing(directory: Path, kind: str) -> Path:
    """Such a model as the hub has it."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**SEEING[kind]))
    model.save_pretrained(directory)
    return directory


def save_heard(directory: Path, kind: str, *, own_config: bool = False) -> Path:
    """Its language model alone, beside the config of both, as runs have exported it, or beside its own."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**SEEING[kind])
    AutoModelForCausalLM.from_config(config.get_text_config()).save_pretrained(directory)
    if not own_config:
        config.save_pretrained(directory)
    return directory


def save_further(directory: Path, kind: str, prefix: str) -> Path:
    """With weights of a layer that predicts further tokens."""
    save_checkpoint(directory, kind)
    further = {f"{prefix}.input_layernorm.weight": torch.ones(32), f"{prefix}.eh_proj.weight": torch.ones(32, 64)}
    return change(directory, lambda tensors: {**tensors, **further})


def assert_whole(directory: Path, caplog: pytest.LogCaptureFixture, said: str | None = None) -> None:
    """A model is not refused, and without one of the weights of its first layer it is; what is `said` of it."""
    add_tokenizer(directory)
    load_for_inference(directory, CPU)
    lines = notes(caplog)
    assert [said is not None and said in line for line in lines] == [True] * (said is not None), lines
    first = re.compile(r"(layers|h|blocks)\.0\.")
    lacking = next(
        k for k in sorted(weights_of(directory)) if first.search(k) and not re.search("visual|vision|bias", k)
    )
    refusal(change(directory, without(lacking)))


TOWER = "not read, as no layer of a Llama4ForCausalLM has them: multi_modal_projector.linear_1.weight, vision_model."


def test_a_model_that_also_sees_is_read_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the tower as the hub has it, and without."""
    assert_whole(save_seeing(tmp_path / "llama4", "llama4"), caplog, TOWER)
    assert_whole(save_seeing(tmp_path / "qwen3_5", "qwen3_5"), caplog)
    assert_whole(save_heard(tmp_path / "heard", "qwen3_5"), caplog)


@pytest.mark.parametrize("most", [1, pytest.param(99, marks=pytest.mark.slow)])
def test_no_model_that_is_whole_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, most: int) -> None:
    """`most`: so many of each group."""
    known = [ARCHITECTURES, EXPERTS, REARRANGED, PARTICULAR, ROTATED, SCALED, UNUSUAL]
    for kind in (each for family in known for each in [*family][:most]):
        assert_whole(save_checkpoint(tmp_path / kind, kind), caplog)
    for kind in ("qwen3_5_moe", "gemma3"):
        assert_whole(save_seeing(tmp_path / kind, kind), caplog)
    for kind in ("qwen3_5_moe", "llama4"):
        assert_whole(save_heard(tmp_path / f"heard-{kind}", kind), caplog)
    for kind in ("qwen3_5", "qwen3_5_moe", "gemma3", "llama4"):
        assert_whole(save_heard(tmp_path / f"text-{kind}", kind, own_config=True), caplog)


def test_no_form_of_a_whole_model_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tied under either name, the decoder alone, quantized, with further layers, in two files."""
    tied, head = save_checkpoint(tmp_path / "tied", "qwen3"), {"model.embed_tokens.weight": "lm_head.weight"}
    assert_whole(change(tied, lambda tensors: {head.get(k, k): t for k, t in tensors.items()}), caplog)
    for kind in ("gemma3_text", "gpt2"):
        build(kind).base_model.save_pretrained(tmp_path / f"decoder-{kind}")
        assert_whole(tmp_path / f"decoder-{kind}", caplog)
    assert_whole(save_checkpoint(tmp_path / "parts", "llama", max_shard_size="50KB"), caplog)
    for kind, block in {"llama": (16, 16), "qwen3_moe": (8, 8), "mistral": None}.items():
        assert_whole(save_fp8(tmp_path / f"fp8-{kind}", kind, block), caplog)
    static = save_fp8(tmp_path / "static", "llama", (16, 16))
    scales = {k.replace("weight_scale_inv", "activation_scale"): torch.tensor(1.0) for k in weights_of(static)}
    assert_whole(change(static, lambda tensors: {**scales, **tensors}), caplog)
    assert_whole(save_mxfp4(tmp_path / "mxfp4"), caplog)
    assert_whole(save_further(tmp_path / "mtp", "qwen3", "mtp"), caplog, "has them: mtp.eh_proj.weight, mtp.input_lay")
    assert_whole(save_further(tmp_path / "62", "deepseek_v3", "model.layers.61"), caplog)  # transformers ignores it
    further = save_further(tmp_path / "glm4", "glm4", "model.layers.2")
    assert_whole(
        further, caplog, "no layer of a Glm4ForCausalLM has them: model.layers.2.eh_proj.weight, model.layers.2"
    )
    old = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.0.attn.masked_bias": torch.tensor(-1e9)}
    assert_whole(change(save_checkpoint(tmp_path / "gptj", "gptj"), lambda tensors: {**tensors, **old}), caplog)
