"""What people write by habit, and the line that they get: it names the field, the value, and what to write here."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoConfig

from raytune_fsdp import load_config
from raytune_fsdp.base.errors import ConfigError, DataError, ModelError, ResumeError, in_one_line
from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import ROOT
from raytune_fsdp.config.other_names import _VALUES, OURS
from raytune_fsdp.config.schema import describe, find_place
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.config.sections.eval import EarlyStopConfig
from raytune_fsdp.config.sections.method import Ia3Method, LoraMethod
from raytune_fsdp.config.sections.model import ModelConfig
from raytune_fsdp.convert.file import PROJECTS
from raytune_fsdp.data.census import census
from raytune_fsdp.data.questions import open_tasks
from raytune_fsdp.data.sources import parquet
from raytune_fsdp.data.sources.source import Columns, File
from raytune_fsdp.model.adapters.attach import attach
from raytune_fsdp.model.network import build_base
from raytune_fsdp.plan.identity import check_identity
from raytune_fsdp.predict.trace.live import TookTooLong
from raytune_fsdp.record import names
from raytune_fsdp.record.console import event_in_words
from raytune_fsdp.run import prepare
from raytune_fsdp.run.evaluation.early_stop import ended_by
from tests.rows import make_windows

SECTIONS = {
    "run": {"name": "x"},
    "model": {"path": "m"},
    "data": {"train": [{"path": "rows.jsonl"}]},
    "train": {"global_batch": 4, "max_steps": 5},
}

FLAGS = {
    # Names of Transformers, TRL, PEFT, axolotl and LLaMA-Factory.
    "--learning_rate=1e-4": "learning_rate=0.0001: unknown section; here it is optim.lr",
    "--optim.learning_rate=1e-4": "optim.learning_rate=0.0001: unknown field; here it is optim.lr",
    "--Learning_Rate=1e-4": "Learning_Rate=0.0001: unknown section; here it is optim.lr",
    "--lr_scheduler_type=cosine": "lr_scheduler_type=cosine: unknown section; here it is optim.schedule",
    "--num_epochs=3": "num_epochs=3: unknown section; here it is train.epochs",
    "--num_train_epochs=3": "num_train_epochs=3: unknown section; here it is train.epochs",
    "--train.num_epochs=3": "train.num_epochs=3: unknown field; here it is train.epochs",
    "--per_device_train_batch_size=4": "per_device_train_batch_size=4: unknown section; here it is train.micro_batch",
    "--gradient_accumulation_steps=4": "gradient_accumulation_steps=4: unknown section; here it is train.global_batch, "
    "the samples of a step on all ranks together",
    "--report_to=wandb": "report_to=wandb: unknown section; here it is tracking.mlflow.enabled, tracking.wandb.enabled "
    "and tracking.tensorboard.enabled",
    "--save_steps=50": "save_steps=50: unknown section; here it is checkpoint.every",
    "--save_total_limit=2": "save_total_limit=2: unknown section; here it is checkpoint.keep_last",
    "--eval_steps=50": "eval_steps=50: unknown section; here it is eval.every",
    "--logging_steps=1": "logging_steps=1: unknown section; here it is train.log_every",
    "--output_dir=out": "output_dir=out: unknown section; here it is run.storage and run.name",
    "--base_model=m": "base_model=m: unknown section; here it is model.path",
    "--model_name_or_path=m": "model_name_or_path=m: unknown section; here it is model.path",
    "--model.attn_implementation=sdpa": "model.attn_implementation=sdpa: unknown field; here it is model.attention",
    "--max_seq_length=1024": "max_seq_length=1024: unknown section; here it is data.seq_len",
    "--data.max_length=1024": "data.max_length=1024: unknown field; here it is data.seq_len",
    "--lora_r=8": "lora_r=8: unknown section; here it is method.rank",
    "--lora_target_modules=q_proj": "lora_target_modules=q_proj: unknown section; here it is method.target_modules",
    "--load_in_4bit=true": "load_in_4bit=true: unknown section; here it is method.type=qlora with method.quantization",
    "--bf16=true": "bf16=true: unknown section; here it is parallel.precision",
    "--gradient_checkpointing=true": "gradient_checkpointing=true: unknown section; here it is "
    "parallel.activation_checkpointing",
    "--deepspeed=zero3.json": "deepspeed=zero3.json: unknown section; here it is parallel.strategy",
    "--push_to_hub=true": "push_to_hub=true: unknown section; here it is export.push",
    # Their values.
    "--optim.optimizer=adamw_8bit": "optim.optimizer=adamw_8bit: here it is {type: adamw, moments: 8bit}",
    "--optim.optimizer.type=adamw_8bit": "optim.optimizer.type=adamw_8bit: here it is {type: adamw, moments: 8bit}",
    "--optim.optimizer=adamw_torch": "optim.optimizer=adamw_torch: here it is {type: adamw}",
    "--parallel.strategy=zero3": "parallel.strategy=zero3: here it is full_shard",
    "--parallel.precision=bfloat16": "parallel.precision=bfloat16: here it is bf16",
    "--cluster.device=gpu": "cluster.device=gpu: here it is cuda",
    "--model.attention=fa2": "model.attention=fa2: here it is flash_attention_2",
    "--data.train.0.format.type=alpaca": "data.train.0.format.type=alpaca: here it is instruction, with style: alpaca",
    "--data.train.0.format.type=ShareGPT": "data.train.0.format.type=ShareGPT: here it is chat, with messages: "
    "conversations",
    "--optim.schedule.type=constant_with_warmup": "optim.schedule.type=constant_with_warmup: here it is constant",
    # Slips of the pen.
    "--train.global_bacth=4": "train.global_bacth=4: unknown field; nearest: train.global_batch; "
    "`raytune-fsdp train --help train` lists all",
    "--parallel.strategy=FULL_SHARDS": "nearest: full_shard",
    "--optim.lr=fast": "optim.lr=fast: must be number > 0",
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_answered_in_a_line(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SECTIONS, [flag])
    (line,) = str(caught.value).splitlines()
    assert FLAGS[flag] in line and line.endswith(f"(from flag {flag.partition('=')[0]})")
    assert len(textwrap.wrap(line, 100)) <= 2


def test_bits_of_qlora() -> None:
    with pytest.raises(ConfigError, match=r"method.bits=4: unknown .* here it is method.type=qlora with method.quant"):
        load_config(SECTIONS, ["--method.type=qlora", "--method.bits=4"])
    with pytest.raises(ConfigError, match=r"^method.quantization=4: here it is nf4 "):
        load_config(SECTIONS, ["--method.type=qlora", "--method.quantization=4"])


def test_sections_may_have_paths_and_tuples() -> None:
    sections = {
        **SECTIONS,
        "run": {"name": "x", "storage": Path("there")},
        "data": {"train": ({"path": Path("rows")},)},
    }
    made = load_config(sections, ["--data.train.0.name=rows"])
    assert (made.run.storage, made.data.train[0].path, made.data.train[0].name) == ("there", "rows", "rows")
    assert sections["data"] == {"train": ({"path": Path("rows")},)}, "overrides change nothing of the caller's"


def test_case_does_not_matter_in_names_and_choices() -> None:
    made = load_config({**SECTIONS, "Optim": {"LR": 3e-4, "optimizer": {"type": "Muon", "momentum": 0.9}}})
    assert made.optim.lr == 3e-4 and made.optim.optimizer.type == "muon"
    flags = ["--parallel.strategy=Shard_Grad_Op", "--method.type=LoRA", "--Method.Rank=4"]
    assert load_config(SECTIONS, ["--method={Type: LoRA, RANK: 4}"]) == load_config(SECTIONS, flags[1:])
    made = load_config(SECTIONS, flags)
    assert (made.parallel.strategy, made.method.type, made.method.rank) == ("shard_grad_op", "lora", 4)  # type: ignore[union-attr]


def test_case_does_not_matter_between_a_file_and_flags() -> None:
    kept = {
        **SECTIONS,
        "optim": {"optimizer": {"type": "adamw", "moments": "8bit"}},
        "method": {"type": "LoRA", "rank": 64},
    }
    made = load_config(kept, ["--optim.optimizer.type=AdamW", "--method.type=lora", "--Optim.LR=1e-3"])
    assert made.optim.optimizer.moments == "8bit" and made.method.rank == 64  # type: ignore[union-attr]
    made = load_config({**SECTIONS, "Optim": {"LR": 1e-4}}, ["--optim.beta1=0.8"])
    assert (made.optim.lr, made.optim.beta1) == (1e-4, 0.8)


def test_a_config_of_ours_with_names_of_others_is_answered_name_by_name(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {path: m}\nbf16: true\nreport_to: wandb\noutput_dir: out\n")
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert f"bf16=true: unknown section; here it is parallel.precision (from {config} line 2)" in str(caught.value)


def test_digests_of_steps_are_refused_where_ranks_have_parts_of_rows() -> None:
    with pytest.raises(ConfigError, match=r"^run.digest_every=1 with parallel.mesh.tensor=2: .* leave it out"):
        load_config(SECTIONS, ["--run.digest_every=1", "--parallel.mesh.tensor=2"])


def test_case_matters_in_texts_and_in_names_given_twice() -> None:
    made = load_config({**SECTIONS, "run": {"name": "Full_Shard"}, "cluster": {"env": {"Path": "A", "PATH": "B"}}})
    assert made.run.name == "Full_Shard" and made.cluster.env == {"Path": "A", "PATH": "B"}
    with pytest.raises(ConfigError, match="optim.LR=2: unknown field; nearest: optim.lr"):
        load_config({**SECTIONS, "optim": {"LR": 2, "lr": 1e-4}})


def test_none_is_null_where_null_is_allowed_and_text_is_not(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("train: {epochs: None, max_steps: 5, global_batch: 4}\nrun: {name: None}\nmodel: {path: m}\n")
    made = load_config(config, ["--data.train.0.path=rows.jsonl"])
    assert made.train.epochs is None and made.run.name == "None"
    with pytest.raises(ConfigError, match="optim.lr=None: must be number > 0"):
        load_config(config, ["--optim.lr=None"])


def test_a_file_of_another_trainer_is_answered_with_convert(tmp_path: Path) -> None:
    config = tmp_path / "axolotl.yaml"
    config.write_text("base_model: m\ndatasets: [{path: x, type: alpaca}]\nlearning_rate: 2e-4\nnum_epochs: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert str(caught.value) == (
        f"config file {config}: base_model, datasets, learning_rate are names of another trainer: `raytune-fsdp "
        f"convert {config}` writes a config for this one"
    )


def test_a_mistyped_file_and_recipe_get_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "finetune.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"finetun.yaml: no such file; nearest: .*/finetune.yaml$"):
        load_config(tmp_path / "finetun.yaml")
    with pytest.raises(ConfigError, match=r"no such file \(.*\), and no recipe; nearest: qwen3-8b-lora$"):
        load_config("qwen3-8b-lroa")
    assert load_config("Qwen3-8B-LoRA").method.type == "lora"


CHAT = [
    {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": str(i)}]} for i in range(4)
]
NULL = [{"messages": [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": None}]}]


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


ROWS = {
    lines([{"instruction": "Say 1", "input": "", "output": "1"}]): "rows.jsonl: has no column 'messages', it has "
    "'instruction', 'input', 'output'; set the dataset's format to {type: instruction, style: chat}",
    lines([{"text": "Once"}]): "it has 'text'; set the dataset's format to {type: completion}, which trains on texts",
    lines([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]): "it has "
    "'conversations'; set the dataset's format to {type: chat, messages: conversations}",
    lines([{"question": "a", "answer": "b"}]): "set the dataset's format to {type: instruction, prompt: question, "
    "completion: answer, style: chat}",
    lines([{"instruction": "Say", "context": "1", "response": "1"}]): "format to {type: instruction, input: context, "
    "completion: response, style: chat}",
    lines([{"instruction": "Say 1", "response": "1"}]): "{type: instruction, completion: response, style: chat}",
    lines([{"query": "a", "response": "b"}]): "{type: instruction, prompt: query, completion: response, style: chat}",
    lines([{"title": "a", "body": "b"}]): "it has 'title', 'body'; no column holds a list of messages: set the "
    "dataset's format to {type: instruction, prompt: COLUMN, completion: COLUMN, style: chat} or {type: template, ",
    lines([{"prompt": CHAT[0]["messages"][:1], "completion": CHAT[0]["messages"][1:]}]): "for lists of messages, "
    "set the dataset's format to {type: chat, prompt: prompt, messages: completion}",
    lines([{"prompt": "a", "completion": "b"}]): "set the dataset's format to {type: instruction, prompt: prompt, "
    "completion: completion, style: chat}",
    lines([{"input_ids": [1, 2]}]): "it has 'input_ids'; set the dataset's format to {type: tokens}",
    lines([{"talk": []}]): "it has 'talk'; name the right one in the dataset's format.messages",
    json.dumps(
        CHAT
    ): "the file is one JSON array; a JSON Lines file is UTF-8 text with one JSON object a line: set the "
    "dataset's file_type=json",
    json.dumps(CHAT, indent=1): "the file is one JSON array",
    "".join(json.dumps(each["messages"]) + "\n" for each in CHAT): "is not a JSON object but list; a JSON Lines file",
    lines(NULL): "messages[1].content is missing or null, not text; correct or remove the row",
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n": "is a pointer of Git LFS, not the file "
    "itself: run `git lfs pull` in its repository",
}


@pytest.mark.parametrize("content", ROWS, ids=range(len(ROWS)))
def test_rows_in_another_form_are_answered_with_a_format(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(content)
    assert main(["data", "preview", "--config", "demo", "--data.eval=[]", "--data.train.0.path=rows.jsonl"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rows.jsonl") and ROWS[content] in line
    assert ("bad_rows=skip" in line) == ("column" not in line and "LFS" not in line), line


def test_places_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text(lines(CHAT))
    Path("model.safetensors").touch()
    said = {
        "data preview --config demo --data.eval=[] --data.train.0.path=chatt.jsonl": "chatt.jsonl: no such file "
        f"(relative to {tmp_path}); nearest: chat.jsonl; correct the dataset's path",
        "train --config demo --run.storage=/proc/runs": "run.storage: nothing can be written in /proc (No such file or "
        "directory); choose another path",
        "eval runs/nope": "runs/nope does not exist: name a run, an export, or a Hugging Face model directory "
        "(raytune-fsdp eval --help)",
        "generate model.safetensors hello": "model.safetensors: is a file; name a run, a checkpoint, or a Hugging Face "
        "model directory",
        "train --config demo --train.epochs=null": "train.max_steps=null and train.epochs=null: set exactly one of the "
        "two (from flag --train.epochs)",
    }
    for command, line in said.items():
        assert main(command.split()) == 2
        assert capsys.readouterr().err == f"error: {line}\n"


def test_words_where_numbers_belong_and_words_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    Path("x/config.yaml").write_text("{}")
    said = {
        "step x last": "step 'last': must be a whole number (raytune-fsdp step --help)",
        "generate m hello --temperature 5x": "--temperature '5x': must be a number (raytune-fsdp generate --help)",
        "diff one": "missing: OTHER; usage: raytune-fsdp diff [-h] run other (raytune-fsdp diff --help)",
    }
    for command, line in said.items():
        assert main(command.split()) == 2
        assert capsys.readouterr().err == f"error: {line}\n"


def test_a_line_that_is_indented_otherwise(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run:\n    name: x\n  storage: y\n")
    with pytest.raises(ConfigError, match=r"run.yaml: line 3: it is indented otherwise than the lines above that it "):
        load_config(tmp_path / "run.yaml")


def test_what_ends_a_run_early_names_the_rule() -> None:
    rule = EarlyStopConfig(patience=1, min_delta=5)
    ended = ended_by(rule, {2: {"eval/a/loss": 6.3251770867241754}, 4: {"eval/a/loss": 5.81}})
    assert ended is not None
    assert event_in_words(names.STOPPED_EARLY, ended) == (
        "step 4: the mean loss has not improved by more than 5.0 (eval.early_stop.min_delta) since step 2 (6.3252), so "
        "the run ends here"
    )


def test_a_section_that_differs_is_named_by_its_fields() -> None:
    before = {"data.train.0.format": {"type": "chat", "messages": "messages"}, "optim.lr": 1.0}
    now = {"data.train.0.format": {"type": "instruction"}, "optim.lr": 2.0}
    with pytest.raises(ResumeError) as refused:
        check_identity(before, now, "runs/x", files_before={}, files_now={})
    assert str(refused.value).splitlines()[1:] == [
        "  data.train.0.format.type: was 'chat', is 'instruction'; data.train.0.format.messages: was 'messages', is "
        "'not set'",
        "  optim.lr: was 1.0, is 2.0",
    ]


def test_an_attention_that_a_network_does_not_have() -> None:
    small = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32, "num_local_experts": 2,
    }  # fmt: skip
    with pytest.raises(ModelError, match=r"^model.attention=sdpa: transformers has none .* 'gpt_oss': leave it out"):
        build_base(AutoConfig.for_model("gpt_oss", **small), ModelConfig(path="m", attention="sdpa"), "fp32")


def test_ia3_of_a_network_that_peft_does_not_know() -> None:
    small = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 32,
    }  # fmt: skip
    network = build_base(AutoConfig.for_model("starcoder2", **small), ModelConfig(path="m"), "fp32")
    with pytest.raises(ConfigError, match=r"^method.target_modules=null: PEFT does not know which modules of a Starc"):
        attach(network, Ia3Method(type="ia3"))


def test_an_encoder_is_refused_before_it_is_built(caplog: pytest.LogCaptureFixture) -> None:
    """transformers would warn of it in a line of its own, and advise what makes no decoder of it."""
    bert = AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    with pytest.raises(ModelError) as refused:
        build_base(bert, ModelConfig(path="m"), "fp32")
    assert str(refused.value) == (
        "model: 'bert' is an encoder, whose tokens see the ones they are to predict: choose a decoder, such as Llama, "
        "Qwen or Gemma"
    )
    assert caplog.records == []


SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32,
}  # fmt: skip


def test_modules_that_there_are_not_are_answered_with_all_that_there_are() -> None:
    network = build_base(AutoConfig.for_model("llama", **SMALL), ModelConfig(path="m"), "fp32")
    with pytest.raises(ConfigError) as refused:
        attach(network, LoraMethod(type="lora", target_modules=["wq", "wv", "attn"]))
    assert str(refused.value) == (
        "method.target_modules=['attn', 'wq', 'wv']: a LlamaForCausalLM has no such modules; its linear layers are "
        "called q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"
    )


def test_a_layer_that_peft_does_not_adapt() -> None:
    mamba = AutoConfig.for_model("mamba2", hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1,
                                 num_hidden_layers=1, vocab_size=32)  # fmt: skip
    network = build_base(mamba, ModelConfig(path="m"), "fp32")
    with pytest.raises(ConfigError) as refused:
        attach(network, LoraMethod(type="lora", target_modules=["in_proj", "out_proj"]))
    assert str(refused.value).startswith(
        "method.target_modules=['in_proj', 'out_proj']: PEFT adapts no 'out_proj' of a Mamba2ForCausalLM, as kernels "
        "read its weight past an adapter; its linear layers are called in_proj"
    )


def test_a_wrong_path_of_a_task_is_named_by_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(SECTIONS, ["--eval.tasks.0.type=exact", "--eval.tasks.0.path=nope.jsonl"])
    with pytest.raises(DataError) as refused:
        open_tasks(config, cast(Any, None), 10, positions=10)
    assert str(refused.value) == (
        f"eval.tasks.0: nope.jsonl: no such file (relative to {tmp_path}); correct eval.tasks.0.path"
    )


def test_a_column_that_no_row_has_is_said_of_the_dataset_and_of_one_row_else(tmp_path: Path) -> None:
    """Rows are shuffled, so the row that would be named is any."""
    for bad, named in (
        (4, "rows.jsonl: has no column 'text', it has 'body'"),
        (1, "rows.jsonl:3: has no column 'text'"),
    ):
        rows = [{"text": "Once"}] * (2 if bad == 1 else 0) + [{"body": "Once"}] * bad
        (tmp_path / "rows.jsonl").write_text(lines(rows))
        data = DatasetConfig.model_validate({"path": str(tmp_path / "rows.jsonl"), "format": {"type": "completion"}})
        with pytest.raises(DataError, match=re.escape(named)) as refused:
            census(make_windows([data], cache=tmp_path / f"cache{bad}"))
        assert ("bad_rows=skip" in str(refused.value)) == (bad == 1), "not where it would leave out everything"


def test_an_object_in_a_store_that_changes_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a decoder says of bytes of another object means nothing."""

    def read_row_group(*_: Any, **__: Any) -> Any:
        raise OSError("Couldn't deserialize thrift: TProtocolException: Invalid data")

    opened = SimpleNamespace(schema_arrow=SimpleNamespace(names=["text"]), read_row_group=read_row_group)
    monkeypatch.setattr(parquet, "OPEN", SimpleNamespace(get=lambda key, make: (opened, Lock())))
    monkeypatch.setattr(parquet, "with_version", lambda file: replace(file, version="ETag=2"))
    url = "s3://bucket/rows.parquet"
    rows = parquet.ParquetRows(
        shown=url, fingerprint="", count=1, file=File(url, url, 1, "ETag=1"), stored=None, groups="",
        columns=Columns((), (), every=True),
    )  # fmt: skip
    with pytest.raises(DataError, match=rf"^{url}: has other content than when it was opened; .* with the final file$"):
        rows._group(0)


def test_a_model_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("Couldn't instantiate the backend tokenizer from one of: \n(1) a `tokenizers` library file")

    monkeypatch.setattr(prepare, "tokenizer_in", fails)
    with pytest.raises(ModelError) as refused:
        prepare.load_tokenizer(load_config(SECTIONS), tmp_path)
    assert str(refused.value) == (
        f"model.path=m: no tokenizer could be loaded from {tmp_path} (it has no file that transformers knows as a "
        "tokenizer's, such as tokenizer.json); set model.tokenizer to one"
    )


def test_a_prediction_that_took_too_long_is_said_in_words() -> None:
    slow = in_one_line(TookTooLong("its step has too many operations to be followed in the time that there is"))
    assert event_in_words(names.PREDICTED, {"because": slow}) == (
        "memory was not predicted: its step has too many operations to be followed in the time that there is"
    )


def test_other_names_lead_to_fields_that_there_are() -> None:
    known = [each.path for each in describe(ROOT)]
    for name in OURS.values():
        for path in re.findall(r"[a-z_]+\.[a-z_.0-9]+", name):
            assert find_place(ROOT, tuple(path.split("."))) is not None, path
    for field in _VALUES:
        assert any(path.endswith(field) or path == f"{field}.type" for path in known), field


def test_other_names_are_those_that_convert_knows() -> None:
    """And it carries them to the same fields."""
    known: dict[str, str] = {}
    for project in PROJECTS.values():
        for name, option in project.options.items():
            known[name] = known.get(name, "") + option.here
    # PEFT's own, those of scripts, and one that it only compares.
    others = {"r", "bits", "betas", "run_name", "train_file", "train_batch_size", "num_gpus", "num_processes", "dtype"}
    for name in OURS.keys() - others - {"metric_for_best_model"}:
        section = OURS[name].partition(".")[0].partition(",")[0]
        assert name in known and (f"`{section}" in known[name] or known[name].startswith("refused")), name
