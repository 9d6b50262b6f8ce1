"""Whatever is wrong with a request is said in a line that names it, before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raytune_fsdp.cli.train import main
from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER
from tests.models import ARCHITECTURES, add_tokenizer, architecture, save_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that could be trained: two files of weights, and a tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint(directory, "llama", tokenizer=True, vocab_size=1024, max_shard_size="200KB")
    assert len(list(directory.glob("*.safetensors"))) == 2
    return directory


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(good, tmp_path / "model"))


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the command with these fields, and return the line it ends with."""

    def run(**fields: Any) -> str:
        capsys.readouterr()  # of the test itself
        assert main(flags(tmp_path, **fields)) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith("error: ")
        assert not (tmp_path / "runs").exists(), "something was written"
        return line.removeprefix("error: ")

    return run


def flags(directory: Path, **fields: Any) -> list[str]:
    """A request that would be carried out, but for `fields`: `data__seq_len` is `data.seq_len`, None leaves it out."""
    values = {
        "run.name": "bad",
        "run.storage": directory / "runs",
        "data.train.0.path": CONVERSATIONS,
        "data.seq_len": 128,
        "parallel.precision": "fp32",
        "train.global_batch": 4,
        "train.max_steps": 1,
        "tracking.mlflow.enabled": "false",
        "cluster.launch": "local",
        "cluster.device": "cpu",
        **{name.replace("__", "."): value for name, value in fields.items()},
    }
    written = {name: json.dumps(v) if isinstance(v, dict) else str(v) for name, v in values.items() if v is not None}
    return [word for name, value in written.items() for word in (f"--{name}", value)]


def drawn(model_type: str, **values: Any) -> dict[str, Any]:
    """Fields of a randomly initialised network."""
    inline = {"model_type": model_type, **values, "vocab_size": 1024}
    return {"model__init": "random", "model__tokenizer": TOKENIZER, "model__architecture": inline}


def says(line: str, *parts: Any) -> None:
    for part in parts:
        assert str(part) in line, f"{part!r} is not in: {line}"


def test_the_good_model_is_accepted(good: Path, tmp_path: Path) -> None:
    """Else every refusal below would prove nothing."""
    assert main(flags(tmp_path, model__path=good, tracking__console="false")) == 0
    assert (tmp_path / "runs" / "bad" / "export" / "config.json").is_file()


def test_no_file_that_a_tokenizer_s_config_names_is_in_the_run_or_its_export(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What its config names is left out and named; the run goes on with what is in the model's directory."""
    secret = tmp_path / "credentials"
    secret.write_text("aws_secret_access_key = wJalrXUtnFEMI\n")
    (model / "tokenizer.json").unlink()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = {"tokenizer_class": "BertTokenizer", "vocab": str(secret), "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "special_tokens_map_file": "/home/me/x.json"}))
    with caplog.at_level("WARNING"):
        assert main(flags(tmp_path, model__path=model, tracking__console="false")) == 0
    run = tmp_path / "runs" / "bad"
    assert (run / "model" / "tokenizer.json").is_file() and (run / "export" / "tokenizer.json").is_file()
    assert not [
        file for file in tmp_path.rglob("*") if file.is_file() and b"wJalr" in file.read_bytes() and file != secret
    ]
    (said,) = [each.getMessage() for each in caplog.records if "arguments that name files" in each.getMessage()]
    says(said, model / "tokenizer_config.json: vocab, special_tokens_map_file")


def test_paths_that_are_no_models(refused: Refused, tmp_path: Path, model: Path) -> None:
    missing = tmp_path / "nothing"
    for tokenizer in (None, TOKENIZER):
        says(refused(model__path=missing, model__tokenizer=tokenizer), f"model.path={missing}", "no such directory")
        file = model / "config.json"
        says(refused(model__path=file, model__tokenizer=tokenizer), f"model.path={file}", "is a file", "directory")
    (tmp_path / "empty").mkdir()
    says(refused(model__path=tmp_path / "empty"), "has no config.json", "must be a Hugging Face model directory")
    adapter, base = tmp_path / "adapter", "acme/base\x1b[2J"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    (adapter / "adapter_model.safetensors").touch()
    way_out = f"method.type=lora, method.adapter={adapter} and model.path to its base"
    said = refused(model__path=adapter, model__tokenizer=TOKENIZER)
    says(said, f"model.path={adapter} is an adapter", way_out, "names 'acme/base\\x1b[2J'", "RUN DIRECTORY --merge`")
    shutil.copy(model / "config.json", adapter)  # as some trainers write it into an adapter's directory
    said = refused(model__path=adapter, model__tokenizer=TOKENIZER)
    says(said, str(adapter), "has the weights of an adapter alone: set method.adapter to it")
    says(refused(model__path="a/b/c"), "model.path=a/b/c", "no such directory")
    says(refused(model__path="../models"), "model.path=../models", "no such directory")


@contextmanager
def kept_from_us(path: Path) -> Iterator[None]:
    """A file or directory that this process may not read; root, who may read everything, is somebody else meanwhile."""
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(0)
    try:
        os.seteuid(user or 65534)
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)


def test_files_that_may_not_be_read(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TemporaryDirectory() as directory:  # pytest's own may be entered by nobody else
        here = Path(directory)
        here.chmod(0o777)
        model, data = here / "above" / "model", here / "rows.jsonl"
        shutil.copytree(good, model)
        shutil.copy(CONVERSATIONS, data)
        for file in model.iterdir():
            file.chmod(0o666)
        for path, name, *parts in (
            (model / "config.json", model, "config.json may not be read by this user (permission denied)"),
            (model / "tokenizer.json", model, "tokenizer.json may not be read by this user (permission denied)"),
            (model / INDEX, model, f"{INDEX} may not be read by this user (permission denied)"),
            (sorted(model.glob("*.safetensors"))[1], model, "may not be read by this user (permission denied)"),
            (model, model, "cannot be read: permission denied for this user"),
            (model.parent, model, "cannot be read: permission denied for this user"),
            (data, data, "cannot be read (Permission denied)"),
        ):
            with kept_from_us(path):
                assert main(flags(here, model__path=model, data__train__0__path=data)) == 2
            (line,) = capsys.readouterr().err.splitlines()
            says(line, name, *parts)


def test_wrong_fields_and_batches(refused: Refused, good: Path) -> None:
    says(refused(model__path=good, model__pth="x"), "model.pth", "unknown field; nearest: model.path")
    says(refused(model__path=good, train__global_batch="many"), "train.global_batch=many", "integer >= 1")
    line = refused(model__path=good, train__micro_batch=3)
    says(line, "train.global_batch=4", "not a multiple of train.micro_batch=3", "3 or 6")
    line = refused(model__path=good, cluster__workers=5)
    says(line, "train.global_batch=4", "train.micro_batch=1", "5 ranks", "at most 4", "at least 5")
    line = refused(model__path=good, cluster__workers=4, parallel__strategy="hybrid_shard", parallel__shard_size=3)
    says(line, "parallel.shard_size=3", "world size 4", "[1, 2, 4]")
    for name in ("..", "a..b", "../b", "a/b", "/tmp/a"):
        says(refused(model__path=good, run__name=name), f"run.name={name}", "without '..' or '/'")


def test_weights_only_as_pickle(refused: Refused, model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    says(refused(model__path=model), model, "no weights to load")
    torch.save({}, model / "pytorch_model.bin")
    says(refused(model__path=model), "pytorch_model.bin", "pickle", "can run code", "safetensors")


def test_a_weight_file_that_is_missing_or_cut(refused: Refused, model: Path) -> None:
    file = sorted(model.glob("*.safetensors"))[1]
    content = file.read_bytes()
    for size in (0, 20, len(content) - 1):
        file.write_bytes(content[:size])
        says(refused(model__path=model), file, "not a complete safetensors file", "download it again")
    file.unlink()
    says(refused(model__path=model), model, "lacks 1 of its weight files", file.name, "download the model again")


def test_a_single_weight_file_that_is_cut(refused: Refused, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "single", "llama", tokenizer=True, vocab_size=1024)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    says(refused(model__path=model), file, "not a complete safetensors file", "download it again")


def test_an_index_that_is_wrong(refused: Refused, model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    files = sorted(file.name for file in model.glob("*.safetensors"))
    for broken in ("{", "[]", "{}", '{"weight_map": 3}'):
        (model / INDEX).write_text(broken)
        says(refused(model__path=model), model / INDEX, "not a safetensors index", "download it again")
    other = {"model.norm.weight": files[files[0] == index["weight_map"]["model.norm.weight"]]}
    (model / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], **other}}))
    says(refused(model__path=model), "does not hold model.norm.weight", "download the model again")


def test_weights_of_another_architecture(refused: Refused, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(architecture("gpt2", vocab_size=1024)))
    line = refused(model__path=model)
    says(line, model, "GPT2LMHeadModel (gpt2)", "27 missing (transformer.h.0", "unknown (model.embed_tokens.weight")


def test_missing_extra_and_misshapen_weights(refused: Refused, good: Path) -> None:
    line = refused(model__path=good, model__overrides={"num_hidden_layers": 3})
    says(line, good, "9 missing (model.layers.2.", "none unknown")
    line = refused(model__path=good, model__overrides={"num_hidden_layers": 1})
    says(line, good, "none missing", "9 unknown (model.layers.1.")
    line = refused(model__path=good, model__overrides={"intermediate_size": 96})
    says(line, "mlp.gate_proj.weight is [64, 32] in the files and [96, 32] in the network", "(and 5 more)")


def test_experts_that_are_missing(refused: Refused, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "mixtral", "mixtral", tokenizer=True, vocab_size=1024)
    whole = load_file(model / "model.safetensors")

    def without(*parts: str) -> str:
        left = {key: t for key, t in whole.items() if not any(part in key for part in parts)}
        save_file(left, model / "model.safetensors", metadata={"format": "pt"})
        return refused(model__path=model)

    says(
        without("layers.1.mlp.experts.2.", "layers.1.block_sparse_moe.experts.2."),
        "experts.3.w",
        "comes after",
        "experts.1.w",
    )
    says(without("experts.4."), "mlp.experts.", "is [4, ", "in the files and [5, ", "in the network")
    says(without("experts.4.w3"), "transformers cannot convert model.layers.0.mlp.experts.gate_up_proj")
    says(without(".w2."), "missing (model.layers.0.mlp.experts.down_proj")


def test_weights_that_are_quantized(refused: Refused, model: Path) -> None:
    """Refused by the config alone, before weights are looked at; tests/unit/test_quantized.py has the rest."""
    config = json.loads((model / "config.json").read_text())

    def of(**quantization: Any) -> str:
        (model / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        return refused(model__path=model)

    for method in ("bitsandbytes", "gptq", "awq", "compressed-tensors", "fbgemm_fp8"):
        line = of(quant_method=method)
        says(line, f"model.path={model}", f"quantized ({method})", "name the model's 16-bit original")
    says(of(bits=4), "quantized ({'bits': 4})", "only weights in mxfp4 and fp8")
    says(of(quant_method="fp8", expert_dtype="fp4"), "quantized (fp8 with experts in fp4)")
    for size in ([128], [128, 0], "128", [True, 128]):
        says(of(quant_method="fp8", weight_block_size=size), "weight_block_size=", "two positive numbers")


def test_checkpoints_that_are_none(refused: Refused, tmp_path: Path) -> None:
    """A run to branch from must be named by one of its checkpoints."""
    run = tmp_path / "earlier"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    says(refused(model__path=run), f"model.path={run} is a whole run", "it has none yet")
    checkpoint = run / "checkpoints" / "step-00000004.a1"
    checkpoint.mkdir(parents=True)
    says(refused(model__path=checkpoint), f"model.path={checkpoint}", "has no config.json")
    (checkpoint / "manifest.json").write_text("{}")
    says(refused(model__path=run), "a whole run", f"for example {checkpoint}")


def test_configs_that_transformers_does_not_accept(refused: Refused, model: Path) -> None:
    llama = {**ARCHITECTURES["llama"], "vocab_size": 1024}
    says(refused(**drawn("lama")), "model.architecture.model_type='lama'", "check the spelling")
    says(refused(**drawn("llama", hidden_size="big")), "model.architecture (llama)", "'hidden_size' expected int")
    says(refused(**drawn("llama", **{**llama, "num_attention_heads": 0})), "model.architecture (llama)")
    says(refused(**drawn("llama", **{**llama, "layer_types": ["a"]})), "model.architecture (llama)", "layer_types")
    says(refused(**drawn("llama", **{**llama, "pad_token_id": 5000})), "'llama'", "cannot build")
    line = refused(**drawn("llama", **{**llama, "hidden_act": "siluu"}))
    says(line, "'llama'", "hidden_act='siluu' is not known", "nearest: silu")
    line = refused(**drawn("llama", **{**llama, "rope_parameters": {"rope_type": "llama4", "rope_theta": 10000.0}}))
    says(line, "'llama'", "rope_parameters.rope_type='llama4' is not known", "nearest: llama3")
    line = refused(model__path=model, model__overrides={"hidden_act": "swish!"})
    says(line, "hidden_act='swish!' is not known", "nearest: swish")
    line = refused(model__path=model, model__overrides={"hidden_size": "big"})
    says(line, "model.overrides.hidden_size='big'", "expected int")
    line = refused(model__path=model, model__overrides={"hiden_size": 3})
    says(line, "model.overrides.hiden_size=3", "no such attribute")
    config = json.loads((model / "config.json").read_text())
    for broken in ("{", "{}", json.dumps({**config, "hidden_size": "big"}), json.dumps({**config, "layer_types": [1]})):
        (model / "config.json").write_text(broken)
        says(refused(model__path=model), f"model.path={model}", "not a config that transformers accepts")


def test_weights_that_are_made_in_fp32_whatever_the_type(refused: Refused) -> None:
    """One rank alone may mix types; FSDP gathers a block in one buffer."""
    line = refused(**drawn(**architecture("zamba")), parallel__precision="bf16_pure", cluster__workers=2)
    says(line, "parallel.precision=bf16_pure", "ZambaForCausalLM keeps model.layers.0.mamba.A_log in fp32", "=bf16")


@pytest.mark.slow
def test_networks_that_are_no_causal_decoders(refused: Refused) -> None:
    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    says(refused(**drawn("bert", **bert)), "'bert' is an encoder", "choose a decoder")
    says(refused(**drawn("t5")), "cannot build a causal LM of type 't5'")
    says(refused(**drawn("vit") | {"model__architecture": {"model_type": "vit"}}), "'vit' is not a language model")


def test_a_buffer_that_nothing_computes(refused: Refused, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in code of a model's own that computes it in __init__, which then happens without memory."""
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", lambda self, module: None)
    says(refused(model__path=good), "LlamaModel does not compute its buffer model.rotary_emb.inv_freq")


def test_sequences_longer_than_the_model_s_positions(refused: Refused, good: Path) -> None:
    line = refused(**drawn("mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=64), data__packing="none")
    says(line, "data.seq_len=128", "64 positions", "max_seq_len", "at most 64")
    line = refused(model__path=good, data__seq_len=129)
    says(line, "data.seq_len=129", "128 positions", "max_position_embeddings", "at most 128")


def test_tokenizers_that_do_not_fit(refused: Refused, model: Path, tmp_path: Path) -> None:
    small = save_checkpoint(tmp_path / "small", "llama", tokenizer=True)
    line = refused(model__path=small)
    says(line, "ids up to 1023", "only 131 tokens", "model.resize_embeddings=true")
    line = refused(model__init="random", model__architecture=architecture("llama"))
    says(line, "model.tokenizer is not set", "set model.tokenizer")
    (model / "tokenizer.json").write_text("{")
    says(refused(model__path=model), f"model.path={model}", "no tokenizer could be loaded", "set model.tokenizer")
    for file in [*model.glob("tokenizer*"), *model.glob("*.jinja")]:
        file.unlink()
    says(refused(model__path=model), f"model.path={model}", "no tokenizer could be loaded", "set model.tokenizer")


def test_packing_needs_positions(refused: Refused, tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=1024, hidden_size=32, n_layer=2, n_head=4)).save_pretrained(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    line = refused(model__path=tmp_path / "m")
    says(line, "data.packing=best_fit", "BloomForCausalLM takes no position_ids", "set data.packing=none")


@pytest.mark.slow
def test_a_wrong_request_ends_the_process_with_2(tmp_path: Path, model: Path) -> None:
    """The same through a process of its own, with nothing imported before."""
    (model / INDEX).unlink()
    words = flags(tmp_path, model__path=model)
    command = [sys.executable, "-m", "raytune_fsdp.cli.main", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "no weights to load" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_while_the_command_is_being_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raytune_fsdp.cli.train.ConfigParser", interrupted)
    assert main(["--config", "demo"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
