"""A run with a head that scores, trained, saved and exported: others get its scores from what it leaves."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.base.row_hashes import root
from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_checkpoint
from raytune_fsdp.cli import chat, generate
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.publish import average, checkpoints_to_average, digests_as_export, publish
from raytune_fsdp.run.trials.score_proof import scores_of_head
from tests.models import save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import make_config, train_rank

SLOW = pytest.mark.slow
CPU = torch.device("cpu")
LORA = {"type": "lora", "rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
LABELS = ["poor", "fair", "good"]
FP32 = ExportConfig(dtype="fp32")


def words(rng: random.Random) -> str:
    return " ".join(f"w{rng.randrange(30, 64)}" for _ in range(rng.randrange(3, 18)))


def rows(home: Path, objective: str) -> dict[str, Any]:
    """A dataset of an objective."""
    rng, file = random.Random(3), home / f"{objective}.jsonl"
    made = [
        {
            "prompt": words(rng),
            "chosen": words(rng),
            "rejected": words(rng),
            "text": words(rng),
            "label": rng.randrange(3),
        }
        for _ in range(60)
    ]
    file.write_text("\n".join(map(json.dumps, made)))
    pairs = {"type": "preference", "style": "plain"}
    return {
        "path": str(file),
        "format": pairs if objective == "reward" else {"type": "score", "text": "text", "label": "label"},
    }


def config_of(
    home: Path,
    model: str,
    objective: str,
    method: Mapping[str, Any],
    *,
    name: str = "run",
    path: Path | None = None,
    labels: Sequence[str] = LABELS,
) -> FinetuneConfig:
    """A run of two steps that begins with a base that predicts tokens, or with `path`."""
    base = home / "base"
    if not base.exists():
        save_checkpoint(base, model)
    head = {"type": "score", **({} if objective == "reward" else {"labels": labels})}
    place = {"path": str(path or base), "init": "pretrained", "architecture": None, "head": head}
    return make_config(
        home,
        run={"name": name},
        model=place,
        data={"train": [rows(home, objective)], "seq_len": 64, "window": 32},
        method=method,
        parallel={"precision": "fp32"},
        checkpoint={"every": 1, "asynchronous": False},
        train={"global_batch": 4, "micro_batch": 2, "max_steps": 2, "objective": {"type": objective}},
    )


def run(
    home: Path, model: str, objective: str, method: Mapping[str, Any], name: str = "run", world: int = 2, **more: Any
) -> Path:
    """The directory of such a run, which has been trained."""
    resident_ranks(train_rank, world, config_of(home, model, objective, method, name=name, **more).model_dump())
    return home / "runs" / name


def texts() -> list[str]:
    rng = random.Random(8)
    return [words(rng) for _ in range(8)]


def ours(directory: Path, tokenizer: Any) -> torch.Tensor:
    """What the network of the run's newest checkpoint makes of each text alone."""
    network = load_checkpoint(find_checkpoint(directory), CPU)
    return torch.cat([scores_of_head(network, torch.tensor([tokenizer(each).input_ids])) for each in texts()])


def by_the_card(place: Path, tokenizer: Any) -> torch.Tensor:
    """What the code on the card computes."""
    (code,) = re.findall(r"```python\n(.*?)```", (place / "README.md").read_text(), re.DOTALL)
    code = re.sub(r"^texts = .*$", "", code, flags=re.MULTILINE)
    scope: dict[str, Any] = {"here": str(place), "texts": texts()}
    exec(code, scope)
    found: torch.Tensor = scope["scores"].detach()
    return found


def check_scores_of(directory: Path, place: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    wanted, found = ours(directory, tokenizer), by_the_card(place, tokenizer)
    assert len({round(each, 6) for each in wanted.flatten().tolist()}) > 4
    assert (found - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        ("llama", "classification"),
        ("gpt2", "reward"),
        pytest.param("qwen3", "reward", marks=SLOW),
        pytest.param("mixtral", "classification", marks=SLOW),
        pytest.param("gemma3", "classification", marks=SLOW),
    ],
)
def test_an_export_scores_by_its_card_as_the_run_does(tmp_path: Path, model: str, objective: str) -> None:
    directory, place = run(tmp_path, model, objective, {"type": "full"}), tmp_path / "export"
    publish(find_checkpoint(directory), place, FP32)
    check_scores_of(directory, place)
    card = (place / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert ("reward: of two answers" in card) == (objective == "reward") and ('| 2 | `"good"` |' in card) != (
        objective == "reward"
    )
    assert f"`{root(digests_as_export(find_checkpoint(directory), FP32))}`" in card
    assert not (place / "generation_config.json").exists()
    if objective == "reward":
        return
    average(checkpoints_to_average(str(directory), steps=None, last=2), tmp_path / "mean", FP32)
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert mean["score.weight"].shape == (3, 32) and not any(name.startswith("lm_head") for name in mean)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"init": "pissa"}, {"dora": True}, {"target_modules": "all-linear"}])
def test_adapters_of_other_kinds_score_as_the_run_does(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    directory = run(tmp_path, "llama", "classification", {**LORA, **changes})
    for merge in (False, True):
        publish(find_checkpoint(directory), tmp_path / f"{merge}", ExportConfig(dtype="fp32", merge=merge))
        check_scores_of(directory, tmp_path / f"{merge}")


def test_an_adapter_and_its_merged_export_score_as_the_run_does(tmp_path: Path) -> None:
    directory = run(tmp_path, "llama", "classification", LORA)
    publish(find_checkpoint(directory), tmp_path / "adapter", FP32)
    publish(find_checkpoint(directory), tmp_path / "merged", ExportConfig(dtype="fp32", merge=True))
    for place in (tmp_path / "adapter", tmp_path / "merged"):
        check_scores_of(directory, place)
    # A run that begins with what was exported has its head.
    head = load_file(tmp_path / "merged" / "model.safetensors")["score.weight"]
    full: Mapping[str, Any] = {"type": "full"}
    merged, trained = tmp_path / "merged", Path(find_checkpoint(directory).path)
    more = {**LORA, "adapter": str(tmp_path / "adapter")}
    again = {
        "merged": run(tmp_path, "llama", "classification", full, name="more", world=1, path=merged),
        "adapter": run(tmp_path, "llama", "classification", more, name="on", world=1),
        "checkpoint": run(tmp_path, "llama", "classification", full, name="branch", world=1, path=trained),
    }
    for name, each in again.items():
        now = load_checkpoint(find_checkpoint(each), CPU).get_output_embeddings().weight
        assert 0 < (now - head).abs().max() < 0.01, f"{name}: two steps from where it began"
    for path in (merged, trained):
        other = {"name": "other", "path": path, "labels": LABELS[::-1]}
        with pytest.raises(ModelError, match="the classes in .* are \\['poor', 'fair', 'good'"):
            prepare(config_of(tmp_path, "llama", "classification", {"type": "full"}, **other), 2)


def test_other_commands_refuse_a_run_that_scores_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run(tmp_path, "llama", "reward", {"type": "full"})
    capsys.readouterr()
    for command in (chat, generate):
        arguments = [str(directory)] if command is chat else [str(directory), "w30 w31"]
        assert command.main(arguments) == 2
        said = capsys.readouterr().err.strip()
        assert "it scores texts and predicts no tokens" in said and "\n" not in said, said
