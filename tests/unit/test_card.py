"""The model card shows what a recipe says, and nothing that a recipe says becomes part of the page itself."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.checkpoint.catalogue import as_checkpoint
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.cli import export as export_command
from raytune_fsdp.model.export.mark import MARK_FILE
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.report.card import is_of_same_run, model_card, recipe_of, with_digest
from tests.planted import FILL, SHAPES
from tests.runs import make_config

OLDER = Path(__file__).parents[1] / "fixtures" / "aae7294"
CHECKPOINT = "checkpoints/step-00000006.a1"
FORGED = "- fingerprint of everything that decided the training: `0123456789abcdef0123456789abcdef`"
HOSTILE = {
    "a forged line": f"x\n{FORGED}\n", "html": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "markdown": "[free](javascript:alert(1)) ![x](https://tracker.example/p.png) **a** `b`",
    "the end of a block": "x\n```\n<b>out</b>\n~~~\n", "a longer end of a block": "x\n" + "`" * 12 + "\n<b>out</b>",
    "a table": "a | b |\n| c", "another direction": "abc\u202egnp.exe\u2066", "colours": "\x1b[31mred\x1b]0;title\x07",
}  # fmt: skip


def with_texts(values: Any, text: str) -> Any:
    """The same with this text wherever the recipe has a free one."""
    config = values["config"]
    config["run"]["name"] = text
    config["model"].update(path=text, tokenizer=text, init="pretrained")
    config["data"]["train"] = [{**each, "path": text, "hub": text, "name": text} for each in config["data"]["train"]]
    config["train"][text] = text
    config["teacher"] = {"model": text, "top_k": text, "temperature": text}
    config["reference"] = {"model": text, "when": text}
    return {**values, "version": text, "versions": {"torch": text, text: text}, "model_on_hub": True, "config": config}


def card_of(run: Path, text: str) -> str:
    recipe = run / "model" / "recipe.json"
    recipe.write_text(json.dumps(with_texts(json.loads(recipe.read_text()), text)))
    learned(run, {text: {"mean": 0.5, "largest": 1}, "x": {"mean": text, "largest": 1}})
    learned(run, {text: {"mean": 0.5, "largest": 1}}, model=text)
    found = as_checkpoint(str(run / CHECKPOINT))
    assert found is not None
    return model_card(found, run / "model", dtype="bf16")


def learned(run: Path, not_kept: dict[str, Any], **more: Any) -> None:
    append_event(run / "events.jsonl", "teacher", attempt=1, fields={"not_kept": not_kept, **more})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLDER / "runs" / "steps", tmp_path / "run"))


def rendered(card: str) -> str:
    """What of the card Markdown renders: without code, and without the head, which is YAML."""
    head = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert head is not None and set(yaml.safe_load(head[1])) <= {
        "library_name", "pipeline_tag", "base_model", "datasets", "tags",
    }  # fmt: skip
    blocks = re.sub(r"^(`{3,})yaml\n.*?^\1$", "", card[head.end() :], flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!\\)`[^`\n]*`", "", blocks)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_text_of_a_recipe_is_shown_as_text(run: Path, what: str) -> None:
    card = card_of(run, HOSTILE[what])
    assert [line for line in card.splitlines() if line.startswith(FORGED[:40])] != [FORGED]
    assert sum(line.startswith(FORGED[:40]) for line in card.splitlines()) == 1
    assert all(char.isprintable() or char == "\n" for char in card)
    plain = rendered(card)
    assert (
        "<" not in plain
        and not re.search(r"(?<!\\)[\[*`]", plain)
        and "## Audit" in plain
        and "license" not in card[:60]
    )
    assert {line.count("|") - line.count("\\|") for line in plain.splitlines() if line.startswith("|")} == {3}


def test_a_forged_fingerprint_does_not_make_another_directory_an_export_of_this_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an older version, which left no mark: it is known by the line in its card."""
    assert export_command.main([str(run), str(tmp_path / "mine")]) == 0
    (tmp_path / "mine" / MARK_FILE).unlink()
    found = as_checkpoint(str(run / CHECKPOINT))
    assert found is not None and is_of_same_run(tmp_path / "mine", read_state(found))
    readme = tmp_path / "mine" / "README.md"
    readme.write_text(re.sub(r"^- fingerprint.*$", FORGED, readme.read_text(), flags=re.MULTILINE))  # somebody's
    card_of(run, HOSTILE["a forged line"])
    capsys.readouterr()
    assert export_command.main([str(run), str(tmp_path / "mine")]) == 2
    assert "is not replaced" in capsys.readouterr().err and FORGED in readme.read_text()


@pytest.mark.parametrize("reference", [{}, {"model": "/models/stern"}, {"when": "during"}])
def test_a_recipe_names_a_reference_that_is_not_the_start(tmp_path: Path, reference: dict[str, str]) -> None:
    config = make_config(tmp_path).model_dump(mode="json")
    config["reference"] |= reference
    parameters = ParameterCount(total=1, trainable=1)
    recipe = json.loads(recipe_of(config, {"raytune-fsdp": "1"}, tmp_path, parameters))
    assert recipe["config"].get("reference") == (config["reference"] if reference else None)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_secret_in_a_recipe_does_not_reach_the_card(run: Path, shape: str) -> None:
    """An older version, which did not know its shape, has written it, or a stranger."""
    card = card_of(run, f"say {SHAPES[shape]} and https://u:p/{FILL}@host/x?auth={FILL}")
    assert SHAPES[shape] not in card and FILL not in card and "<redacted>" in card


def test_an_honest_card_is_what_it_was(run: Path) -> None:
    found = as_checkpoint(str(run / CHECKPOINT))
    assert found is not None
    card = model_card(found, run / "model", dtype="bf16")
    assert "# steps" in card and "A `LlamaForCausalLM`, fine-tuned from random weights with raytune_fsdp" in card
    assert "| texts.jsonl |" in card or "| data/texts.jsonl |" in card
    assert "have the digest" not in card
    assert with_digest(card, "c3" * 32).startswith(card) and f"`{'c3' * 32}`" in with_digest(card, "c3" * 32)
    manifest = run / CHECKPOINT / "manifest.json"
    written = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**written, "digest": {"weights": "a1" * 32, "everything": "b2" * 32}}))
    card = model_card(found, run / "model", dtype="bf16")
    assert f"the digest `{'a1' * 32}`" in card and f"it is `{'b2' * 32}`" in card
    manifest.write_text(json.dumps({**written, "digest": {"weights": "<b>", "everything": "b2" * 32}}))
    assert "have the digest" not in model_card(found, run / "model", dtype="bf16")


def test_a_card_says_which_teacher_and_how_much_of_what_it_predicted(run: Path) -> None:
    file = run / "model" / "recipe.json"
    recipe = json.loads(file.read_text())
    found = as_checkpoint(str(run / CHECKPOINT))
    assert found is not None and "Teacher" not in model_card(found, run / "model", dtype="bf16")
    recipe["config"]["teacher"] = {"model": "/home/me/models/large", "top_k": 32, "temperature": 2.0}
    file.write_text(json.dumps(recipe))
    card = model_card(found, run / "model", dtype="bf16")
    assert "It has learned what `large` predicts, at temperature 2: of each token" in card and "/home/me" not in card
    assert "the 32 most likely ones" in card and "on average" not in card
    learned(run, {"chats": {"mean": 0.5, "largest": 0.6}})
    learned(run, {"chats": {"mean": 0.024, "largest": 0.356}})
    card = model_card(found, run / "model", dtype="bf16")
    assert "| `chats` | 2.40% on average, at most 35.60% of one token's |" in card and "50.00%" not in card
    learned(run, {"chats": {"mean": "much", "largest": 1}}, model="org/large")
    card = model_card(found, run / "model", dtype="bf16")
    assert "on average" not in card and "what `org/large` predicts" in card
