"""An export is loaded as its users load it; that of a base that also sees has all of it, under its own names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.form import began_with
from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.run.publish import average, checkpoints_to_average, publish
from tests.models import SEEING_CLASSES, build_seeing, save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import make_config, train_rank

SLOW = pytest.mark.slow
WHOLE = ExportConfig(dtype="fp32", merge=True)
LORA = {"type": "lora", "rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "lora": LORA,
    "dora": {**LORA, "dora": True},
    "pissa": {**LORA, "init": "pissa"},
    "ia3": {"type": "ia3", "target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
    "experts": {**LORA, "target_modules": ["q_proj"]},
}
EXPERTS = {
    "qwen3_5_moe": "mlp.experts", "llama4": "feed_forward.experts", "mixtral": "mlp.experts", "gpt_oss": "mlp.experts",
}  # fmt: skip
TEXT = ("llama", "qwen3", "qwen3_5_text", "gemma3_text", "mixtral", "gpt_oss")


def run(home: Path, model: str, kind: str) -> tuple[Path, Path]:
    """A run of two steps beside a base: its directory, and the base's."""
    base, method = home / "base", dict(METHODS[kind])
    if not base.exists():
        save_checkpoint(base, model)
        (base / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    if kind == "experts":
        method["target_parameters"] = [f"{EXPERTS[model]}.gate_up_proj", f"{EXPERTS[model]}.down_proj"]
    values = {"path": str(base), "init": "pretrained", "architecture": None, "tokenizer": str(home / "tokenizer")}
    config = make_config(
        home,
        run={"name": kind},
        model=values,
        method=method,
        parallel={"precision": "fp32"},
        checkpoint={"every": 1, "asynchronous": False},
        train={"global_batch": 4, "micro_batch": 2, "max_steps": 2},
    )
    resident_ranks(train_rank, 1, config.model_dump())
    return home / "runs" / kind, base


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that has trained all weights of the language model of a Qwen 3.5."""
    return run(tmp_path_factory.mktemp("qwen"), "qwen3_5", "full")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(7, 27).view(1, 20), use_cache=False).logits
    return found


def loaded(directory: Path) -> tuple[Any, Any]:
    """A model as its own config says that it is loaded, and what transformers reports."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, name)
    model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    return model, report


def check_whole(export: Path, run: Path, base: Path, model: str) -> None:
    """All tensors of the base under its own names, of which only the language model's have changed."""
    as_it_was = json.loads((base / "config.json").read_text())
    there, before = load_file(export / "model.safetensors"), load_file(base / "model.safetensors")
    # What transformers leaves out is the prediction of several tokens.
    assert there.keys() == {key for key in before if not key.startswith("mtp.")}, "the names are the base's own"
    changed = {key for key in there if not torch.equal(there[key], before[key])}
    assert changed and not any("vis" in key or "projector" in key for key in changed)
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == as_it_was["architectures"] and config["model_type"] == model
    assert ("vision_config" in config) == (model in SEEING_CLASSES)
    if model in SEEING_CLASSES:
        assert config["architectures"] == [SEEING_CLASSES[model]]
        assert "image_mean" in (export / "preprocessor_config.json").read_text(), "so that a server can see"
    found, report = loaded(export)
    assert not any(report.values()), report
    ours, _ = load_for_inference(run, torch.device("cpu"))
    wanted = logits(ours)
    assert torch.equal(logits(found), wanted)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)), wanted)
    again, _ = load_for_inference(export, torch.device("cpu"))
    assert torch.equal(logits(again), wanted)


def test_what_was_not_trained_is_carried_through(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    directory, base = qwen
    publish(find_checkpoint(directory), tmp_path / "export", WHOLE)
    check_whole(tmp_path / "export", directory, base, "qwen3_5")
    assert "It is a whole `Qwen3_5ForConditionalGeneration`" in (tmp_path / "export" / "README.md").read_text()
    average(checkpoints_to_average(str(directory), steps=None, last=2), tmp_path / "mean", WHOLE)
    check_names = load_file(tmp_path / "mean" / "model.safetensors").keys()
    assert check_names == load_file(base / "model.safetensors").keys()


def test_a_base_that_is_gone_leaves_the_language_model_alone(
    qwen: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said on the console, on the card and among the run's events; with `--base` it is found again."""
    directory, base = qwen
    moved, export = base.rename(tmp_path / "elsewhere"), tmp_path / "export"
    try:
        publish(find_checkpoint(directory), export, WHOLE)
        (said,) = [record.message for record in caplog.records if "language model alone" in record.message]
        assert "a Qwen3_5ForCausalLM without the parts that see" in said and "say with --base where it is now" in said
        assert "It is the language model alone, a `Qwen3_5ForCausalLM`" in (export / "README.md").read_text()
        event = json.loads((directory / "events.jsonl").read_text().splitlines()[-1])
        assert event["event"] == "exported_alone" and event["fields"]["model"] == "Qwen3_5ForCausalLM"
        config = json.loads((export / "config.json").read_text())
        assert config["architectures"] == ["Qwen3_5ForCausalLM"] and config["model_type"] == "qwen3_5_text"
        assert "vision_config" not in config and "text_config" not in config
        model, report = loaded(export)
        assert not any(report.values()), report
        ours, _ = load_for_inference(directory, torch.device("cpu"))
        assert torch.equal(logits(model), logits(ours))
        publish(find_checkpoint(directory), tmp_path / "again", WHOLE, base=str(moved))
        check_whole(tmp_path / "again", directory, moved, "qwen3_5")
    finally:
        moved.rename(base)


def test_another_model_at_the_place_of_the_base_is_not_mixed_in(
    qwen: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_checkpoint(tmp_path / "other", "qwen3_5", intermediate_size=48)
    publish(find_checkpoint(qwen[0]), tmp_path / "export", WHOLE, base=str(other))
    assert "is another model than the run began with" in caplog.text
    assert json.loads((tmp_path / "export" / "config.json").read_text())["model_type"] == "qwen3_5_text"


@SLOW
def test_a_base_that_has_older_names_gets_them_back(tmp_path: Path) -> None:
    """Experts in one tensor, as the hub has those of Qwen 3.5, where save_pretrained would write one by one."""
    from transformers.core_model_loading import dot_natural_key

    base = save_checkpoint(tmp_path / "base", "qwen3_5_moe")
    tensors = load_file(base / "model.safetensors")
    fused: dict[str, torch.Tensor] = {}
    for layer in range(2):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {
            each: torch.stack([tensors.pop(f"{prefix}.{i}.{each}_proj.weight") for i in range(4)])
            for each in ("gate", "up", "down")
        }
        fused[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        fused[f"{prefix}.down_proj"] = parts["down"]
    tensors |= {**fused, "mtp.fc.weight": torch.ones(2, 2)}
    save_file({key: tensors[key] for key in sorted(tensors, key=dot_natural_key)}, base / "model.safetensors")
    (base / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    directory, _ = run(tmp_path, "qwen3_5_moe", "full")
    publish(find_checkpoint(directory), tmp_path / "export", WHOLE)
    check_whole(tmp_path / "export", directory, base, "qwen3_5_moe")


@SLOW
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *((model, kind) for model in (*SEEING_CLASSES, *TEXT) for kind in METHODS if kind != "experts"),
        *((model, "experts") for model in EXPERTS),
    ],
)
def test_all_exports_are_what_their_users_load(tmp_path: Path, model: str, kind: str) -> None:
    """The whole one as transformers loads it, and the adapter as PEFT does beside the class that its base names."""
    directory, base = run(tmp_path, model, kind)
    checkpoint = find_checkpoint(directory)
    publish(checkpoint, tmp_path / "export", WHOLE)
    check_whole(tmp_path / "export", directory, base, model)
    if kind == "full":
        return
    from peft import PeftModel

    publish(checkpoint, tmp_path / "adapter", ExportConfig())
    network, _ = loaded(base)
    before = logits(network)
    found = PeftModel.from_pretrained(network, tmp_path / "adapter")
    report = found.load_adapter(tmp_path / "adapter", "again")
    found.set_adapter("default")
    assert not report.missing_keys and not report.unexpected_keys
    assert not any(".default" in name and "vis" in name for name, _ in found.named_parameters())
    wanted = logits(loaded(tmp_path / "export")[0])
    assert (wanted - before).abs().max() > 1e-5, "it acts"
    scale = wanted.abs().max()
    assert (logits(found) - wanted).abs().max() <= 2e-6 * scale, "merged and beside it: rounding in fp32"
    again, _ = load_for_inference(tmp_path / "adapter", torch.device("cpu"))
    assert (logits(again) - wanted).abs().max() <= 2e-6 * scale


def test_a_run_that_began_with_a_checkpoint_finds_the_base_of_that(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    """Through the other run's own record of what it began with."""
    directory, base = qwen
    later = tmp_path / "later"
    shutil.copytree(directory, later)
    recipe = json.loads((later / "model" / "recipe.json").read_text())
    recipe["model_at"] = recipe["config"]["model"]["path"] = find_checkpoint(directory).path
    (later / "model" / "recipe.json").write_text(json.dumps(recipe))
    publish(find_checkpoint(later), tmp_path / "export", WHOLE)
    check_whole(tmp_path / "export", later, base, "qwen3_5")


def test_the_base_is_found_from_any_directory(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    """A config may name it relative to the directory in which the run was started."""
    directory, base = qwen
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(directory, elsewhere)
    recipe = json.loads((elsewhere / "model" / "recipe.json").read_text())
    assert recipe["model_at"] == str(base)
    recipe["config"]["model"]["path"] = f"bases/{base.name}"
    (elsewhere / "model" / "recipe.json").write_text(json.dumps(recipe))
    publish(find_checkpoint(elsewhere), tmp_path / "export", WHOLE)
    check_whole(tmp_path / "export", elsewhere, base, "qwen3_5")


HUB = """
import json, sys
from pathlib import Path
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.checkpoint.model_files import find_checkpoint
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.run.publish import publish

if __name__ == "__main__":
    config, export = FinetuneConfig.model_validate(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2]
    if export:
        run = Path(config.run.storage) / config.run.name
        publish(find_checkpoint(run), Path(export), ExportConfig(dtype="fp32"))
    else:
        finetune(config, wait_for_tracking=0)
"""


def test_a_recipe_that_names_the_hubs_commit_is_taken_at_its_word(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    """Older recipes name the branch at most."""
    files = shutil.copytree(qwen[0] / "model", tmp_path / "model")
    recipe = json.loads((files / "recipe.json").read_text())
    assert recipe["model_commit"] is None, "a directory has none"
    model = {**recipe["config"]["model"], "path": "someone/seeing", "revision": "main"}
    recipe |= {"config": {**recipe["config"], "model": model}, "model_on_hub": True, "model_at": None}
    for commit, wanted in (("f" * 40, "f" * 40), (None, "main")):
        (files / "recipe.json").write_text(json.dumps({**recipe, "model_commit": commit}))
        assert began_with(files) == ("someone/seeing", wanted, True)


@SLOW
def test_a_base_of_the_hub_is_that_of_the_commit_that_the_run_began_with(tmp_path: Path) -> None:
    """Whatever the hub, or its cache here, has under the name by now; also after the run has gone on since."""
    repository = tmp_path / "hf" / "hub" / "models--someone--seeing"

    def commit(number: int, seed: int) -> Path:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(f"{number:040x}")
        build_seeing("qwen3_5", seed=seed).save_pretrained(repository / "snapshots" / f"{number:040x}")
        return repository / "snapshots" / f"{number:040x}"

    def do(steps: int, export: str = "") -> None:
        model = {"path": "someone/seeing", "init": "pretrained", "architecture": None}
        config = make_config(
            tmp_path, model=model, data={"packing": "none"}, parallel={"precision": "fp32"},
            train={"global_batch": 2, "micro_batch": 2, "max_steps": steps}, optim={"schedule": {"type": "constant"}},
        )  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        place = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", HUB, str(tmp_path / "config.json"), export]
        done = subprocess.run(command, env={**kept, **place}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    first = commit(1, seed=1)
    do(1)
    commit(2, seed=2)
    recipe = tmp_path / "runs" / "run" / "model" / "recipe.json"
    assert json.loads(recipe.read_text())["model_commit"] == first.name
    do(2)
    assert json.loads(recipe.read_text())["model_commit"] == first.name, "it goes on from a checkpoint of its own"
    do(2, str(tmp_path / "export"))
    there, wanted = load_file(tmp_path / "export" / "model.safetensors"), load_file(first / "model.safetensors")
    towers = [key for key in wanted if "visual" in key]
    assert towers and all(torch.equal(there[key], wanted[key]) for key in towers)


def test_base_of_a_text_model_is_still_refused(tmp_path: Path) -> None:
    """Its run has all of it."""
    base = save_checkpoint(tmp_path / "base", "llama")
    directory, _ = run(tmp_path, "llama", "full")
    with pytest.raises(ModelError, match="holds a whole model, not adapters; leave --base out"):
        publish(find_checkpoint(directory), tmp_path / "export", WHOLE, base=str(base))
