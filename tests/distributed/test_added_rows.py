"""Rows of new tokens that adapters train alone: exact at every world size, nothing else changes, and they come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.publish import publish
from tests.checkpoints import checkpoints, tensors_in
from tests.distributed.test_adapters import FOR_FOUR, SAVES, TRAIN, run_dir
from tests.models import save_checkpoint
from tests.runs import largest_difference, make_config, trajectory, write_tokenizer, write_tokens

pytest.importorskip("peft")

SLOW = pytest.mark.slow
LORA = {"type": "lora", "rank": 4, "alpha": 8, "train_added_tokens": True}
IDS = [64, 65, 66]
TIED = {"llama": False, "qwen3": True, "gemma3_text": True, "gpt2": True}


def config_of(
    directory: Path, model: str, method: dict[str, Any] | None = None, name: str = "run", grown: bool = False,
    **sections: Any,
) -> FinetuneConfig:  # fmt: skip
    """Three new tokens, of which the data has two; the base has rows for them, unless its vocabulary has `grown`."""
    base, data = directory / f"base-{model}", directory / "tokens.jsonl"
    if not base.exists():
        save_checkpoint(base, model, **({"vocab_size": 64} if grown else {}))
    if not data.exists():
        write_tokens(data, vocabulary=66)
        write_tokenizer(directory / "tokenizer")
    tokens = ["tram", {"text": "bus", "like": "w3 w9"}, "boat"]
    values = {"path": str(base), "tokenizer": str(directory / "tokenizer"), "init": "pretrained", "add_tokens": tokens}
    chosen = {"train": TRAIN, "checkpoint": SAVES, "method": method or LORA, **sections}
    return make_config(directory, run={"name": name}, model={**values, "architecture": None}, **chosen)


def rows_in(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if name.startswith("model.") and name.endswith(".added_rows")}


@pytest.mark.parametrize(
    ("model", "grown", "worlds"),
    [
        ("llama", False, (4,)),
        pytest.param("gemma3_text", True, (4,), marks=SLOW),
        *(pytest.param(m, False, (2, 4), marks=SLOW) for m in ("llama", "qwen3", "gpt2")),
    ],
)
def test_worlds_agree(tmp_path: Path, model: str, grown: bool, worlds: tuple[int, ...]) -> None:
    """Also at another number of ranks from the middle on; with three ranks each has a row, with four one has none."""
    sections: Any = {"train": FOR_FOUR, "parallel": {"precision": "fp64"}}
    alone = trajectory(config_of(tmp_path, model, grown=grown, **sections), 1)
    for world in worlds:
        config = config_of(tmp_path, model, name=f"w{world}", grown=grown, **sections)
        trajectory(config, world, stop_after=3)
        rows = trajectory(config, world - 1)
        for key, bound in (("loss", 1e-8), ("grad_norm", 1e-6)):
            assert largest_difference(alone, rows, key) < bound
    tensors = tensors_in(checkpoints(run_dir(config))[-1])
    found = rows_in(tensors)
    assert len(found) == 2 - TIED[model] and all(each.shape == (3, 32) for each in found.values())
    assert all(".lora_" in name or ".added_rows" in name for name in tensors), sorted(tensors)


@SLOW  # the run above is stopped, too, and learns what one does that is not
@pytest.mark.parametrize(("model", "precision"), [("llama", "bf16"), ("qwen3", "fp32"), ("gpt2", "bf16")])
def test_resume_is_bit_equal(tmp_path: Path, model: str, precision: str) -> None:
    sections: Any = {"parallel": {"precision": precision}}
    whole = trajectory(config_of(tmp_path, model, **sections), 2)
    stopped = config_of(tmp_path, model, name="stopped", **sections)
    trajectory(stopped, 2, stop_after=3)
    assert trajectory(stopped, 2) == whole
    ends = [tensors_in(checkpoints(tmp_path / "runs" / name)[-1]) for name in ("run", "stopped")]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("llama", LORA),
        pytest.param("gemma3_text", {**LORA, "dora": True}, marks=SLOW),
        pytest.param("qwen3", {**LORA, "init": "olora"}, marks=SLOW),
        pytest.param("gpt2", LORA, marks=SLOW),
        pytest.param("llama", {**LORA, "type": "qlora"}, marks=SLOW),
    ],
)
def test_what_is_exported_has_the_rows_and_is_what_peft_merges(
    tmp_path: Path, model: str, method: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = config_of(tmp_path, model, method, parallel={"precision": "fp32"})
    prepare(config, 1)
    assert "rows of new tokens stay" not in caplog.text
    trajectory(config, 2)
    checkpoint = find_checkpoint(run_dir(config))
    publish(checkpoint, tmp_path / "adapter", ExportConfig())
    assert "rows of tokens: for them, merge it" in caplog.text
    publish(checkpoint, tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / f"base-{model}", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    found = rows_in(tensors_in(checkpoint))
    assert len(found) == 2 - TIED[model]
    others = [row for row in range(131) if row not in IDS]
    for name, rows in found.items():
        weight = f"{name.removeprefix('model.').removesuffix('added_rows')}weight"
        assert torch.equal(ours[weight][others], before[weight][others])
        assert torch.equal(ours[weight][IDS], rows.float())
        begun = before[weight].double()
        begun = torch.stack([begun.mean(0), begun[[3, 9]].mean(0), begun.mean(0)]).float()
        assert (rows[:2] - begun[:2]).abs().amax(-1).min() > 1e-3
        read = TIED[model] or "lm_head" in name
        assert torch.allclose(rows[2], begun[2], rtol=0, atol=1e-7) != read, "nor does it decay: it is not in the data"
    changed = {name for name in ours if not torch.equal(ours[name], before[name])}
    of_rows = {name for name in changed if ours[name].shape[0] == 131}
    assert all("proj" in name or ".c_" in name for name in changed - of_rows), "adapters and rows, nothing else"
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    bound = 1e-6 if method.get("init") else 0.0  # of twice the rank it is another sum
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=bound) for name in ours)
    inferred = load_for_inference(run_dir(config), torch.device("cpu"))[0].state_dict()
    assert all(torch.equal(inferred[name], ours[name]) for name in ours)


def test_a_bias_that_begins_otherwise_than_the_base_is_merged_or_not_exported(tmp_path: Path) -> None:
    """It stays as it begins, and PEFT's directory would leave out even that."""
    from transformers import AutoModelForCausalLM

    config = config_of(tmp_path, "phi", train={**TRAIN, "max_steps": 2}, parallel={"precision": "fp32"})
    with pytest.raises(ConfigError, match=r"export.merge=false: new tokens .* set export.merge=true"):
        prepare(config.model_copy(update={"export": ExportConfig(at_end=True)}), 1)
    trajectory(config, 1)
    checkpoint = find_checkpoint(run_dir(config))
    with pytest.raises(ConfigError, match=r"lm_head.bias has rows for new tokens that the base does not have"):
        publish(checkpoint, tmp_path / "adapter", ExportConfig())
    publish(checkpoint, tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").lm_head.bias
    stored = load_file(tmp_path / "base-phi" / "model.safetensors")["lm_head.bias"]
    assert torch.equal(merged[64], stored.double().mean().float()) and not torch.equal(merged[64], stored[64])


def test_rows_that_the_base_has_no_place_for_are_merged_or_not_exported(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", grown=True, parallel={"precision": "fp32"})
    exported = config.model_copy(update={"export": ExportConfig(at_end=True)})
    with pytest.raises(ConfigError, match=r"export.merge=false: new tokens .* set export.merge=true"):
        prepare(exported, 1)
    trajectory(config, 1)
    checkpoint = find_checkpoint(run_dir(config))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight has rows for new tokens that .* set export.merge=true"):
        publish(checkpoint, tmp_path / "adapter", ExportConfig())
    assert not (tmp_path / "adapter").exists()
    publish(checkpoint, tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")["model.embed_tokens.weight"]
    (rows,) = rows_in(tensors_in(checkpoint)).values()
    stored = load_file(tmp_path / "base-qwen3" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(merged, torch.cat([stored, rows]))


def test_rows_that_were_not_trained_are_merged_or_not_exported(tmp_path: Path) -> None:
    """The run was trained with the means that they begin with; the base has something else in their place."""
    method = {**LORA, "train_added_tokens": False}
    config = config_of(tmp_path, "llama", method, parallel={"precision": "fp32"}, train={**TRAIN, "max_steps": 2})
    trajectory(config, 1)
    with pytest.raises(ConfigError, match=r"has rows for new tokens that the base does not have, .* export --merge"):
        publish(find_checkpoint(run_dir(config)), tmp_path / "adapter", ExportConfig())
    assert not (tmp_path / "adapter").exists()
    whole = {**method, "modules_to_save": ["embed_tokens", "lm_head"]}
    config = config_of(
        tmp_path, "llama", whole, "whole", parallel={"precision": "fp32"}, train={**TRAIN, "max_steps": 2}
    )
    trajectory(config, 1)
    publish(find_checkpoint(run_dir(config)), tmp_path / "adapter", ExportConfig())


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_as_a_model(tmp_path: Path) -> None:
    """A run that learns nothing, of every weight, ends with the rows; its tokens are tokens of that model."""
    first = config_of(tmp_path, "llama", parallel={"precision": "fp32"})
    trajectory(first, 2)
    found = rows_in(tensors_in(find_checkpoint(run_dir(first))))
    values = config_of(tmp_path, "llama", {"type": "full"}, name="again", parallel={"precision": "fp32"}).model_dump()
    values["model"] |= {"path": checkpoints(run_dir(first))[-1].path, "tokenizer": None, "add_tokens": []}
    values["optim"] |= {"lr": 1e-30, "weight_decay": 0.0}
    again = FinetuneConfig.model_validate(values)
    trajectory(again, 2)
    tensors = tensors_in(find_checkpoint(run_dir(again)))
    for name, rows in found.items():
        assert torch.equal(tensors[name.replace("added_rows", "weight")][IDS], rows)
    values["model"] |= {"path": str(tmp_path / "merged"), "add_tokens": ["tram"]}
    publish(find_checkpoint(run_dir(first)), tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    values |= {"method": LORA, "run": {**values["run"], "name": "third"}}
    with pytest.raises(ConfigError, match="this tokenizer has all tokens of model.add_tokens already"):
        prepare(FinetuneConfig.model_validate(values), 1)


@pytest.mark.slow
def test_evaluation_and_answers_see_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own evaluation is that of the merged model, and so are its answers; the rows count as trained."""
    from raytune_fsdp.cli.main import main

    data = {"eval": [{"name": "same", "path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}]}
    config = config_of(
        tmp_path, "qwen3", parallel={"precision": "fp32"}, data=data,
        eval={"every": 8, "prompts": ["w3 tram bus"], "max_new_tokens": 4},
    )  # fmt: skip
    prepared, _ = prepare(config, 1)
    without, _ = prepare(config_of(tmp_path, "qwen3", {**LORA, "train_added_tokens": False}, name="without"), 1)
    assert prepared.parameters.trainable == without.parameters.trainable + 3 * 32
    assert "train_added_tokens" in prepared.identity["method"]
    assert "train_added_tokens" not in without.identity["method"], "runs from before it go on"
    trajectory(config, 2)
    lines = [json.loads(line) for line in (run_dir(config) / "metrics.jsonl").read_text().splitlines()]
    own = [line["values"]["eval/same/loss"] for line in lines if line["kind"] == "eval"][-1]
    capsys.readouterr()
    monkeypatch.setenv("MASTER_PORT", "0")
    assert main(["eval", str(run_dir(config)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval/same/loss"] == pytest.approx(own, rel=1e-6)
    events = [json.loads(line) for line in (run_dir(config) / "events.jsonl").read_text().splitlines()]
    (said,) = [event["fields"]["answer"] for event in events if event["event"] == "answered"]
    assert main(["generate", str(run_dir(config)), "w3 tram bus", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip() == said
