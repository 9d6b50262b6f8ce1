"""An export replaces what an export made, and takes from a run only what belongs to its model."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.model_files import find_checkpoint
from raytune_fsdp.cli import export as export_command
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.export.mark import MARK_FILE, check_replaceable, put_mark
from raytune_fsdp.run.checks import check_first
from raytune_fsdp.run.publish import publish
from tests.runs import make_config

OLDER = Path(__file__).parents[1] / "fixtures" / "aae7294" / "runs" / "steps"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a checkpoint, as an older version wrote it."""
    return Path(shutil.copytree(OLDER, tmp_path / "runs" / "steps"))


def put(run: Path, destination: Path) -> None:
    publish(find_checkpoint(run), destination, ExportConfig(dtype="trained"))


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def _a_note(export: Path) -> str:
    (export / "notes.txt").write_text("three years of work")
    return "notes.txt, which no export wrote"


def _a_conversion(export: Path) -> str:
    (export / "gguf").mkdir()
    (export / "gguf" / "model.gguf").write_text("an hour of work")
    return "gguf/model.gguf, which no export wrote"


def _a_link(export: Path) -> str:
    (export / "data").symlink_to(export.parent)
    return "data, which no export wrote"


def _an_empty_directory(export: Path) -> str:
    (export / "checkpoints").mkdir()
    return "checkpoints, which no export wrote"


def _an_edited_card(export: Path) -> str:
    card = (export / "README.md").read_text()
    (export / "README.md").write_text(card.replace("step 6", "step 9"))  # of the same size
    return "README.md changed since the export that wrote it"


def _other_weights(export: Path) -> str:
    with open(export / "model.safetensors", "ab") as file:
        file.write(b"more")
    return "model.safetensors changed since the export that wrote it"


def _a_file_that_became_a_link(export: Path) -> str:
    (export / "config.json").rename(export.parent / "config.json")
    (export / "config.json").symlink_to(export.parent / "config.json")
    return "config.json changed since the export that wrote it"


def _no_mark(export: Path) -> str:
    (export / MARK_FILE).unlink()
    (export / "README.md").write_text("# A model of mine\n")
    return f"no export made it (it has no {MARK_FILE})"


def _a_broken_mark(export: Path) -> str:
    (export / MARK_FILE).write_text("{")
    return f"its {MARK_FILE} is not what an export writes"


def _a_mark_of_a_later_version(export: Path) -> str:
    mark = json.loads((export / MARK_FILE).read_text())
    (export / MARK_FILE).write_text(json.dumps({**mark, "format": 2}))
    return f"its {MARK_FILE} has format 2, and this version knows 1"


def _a_mark_that_is_a_pipe(export: Path) -> str:
    (export / MARK_FILE).unlink()
    os.mkfifo(export / MARK_FILE)
    return f"its {MARK_FILE} is not what an export writes"


THINGS = [
    _a_note, _a_conversion, _a_link, _an_empty_directory, _an_edited_card, _other_weights, _a_file_that_became_a_link,
    _no_mark, _a_broken_mark, _a_mark_of_a_later_version, _a_mark_that_is_a_pipe,
]  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("exported")
    put(Path(shutil.copytree(OLDER, home / "steps")), home / "export")
    return home / "export"


@pytest.mark.parametrize("change", THINGS)
def test_work_of_the_user_is_never_replaced(
    run: Path, exported: Path, tmp_path: Path, change: Callable[[Path], str]
) -> None:
    destination = Path(shutil.copytree(exported, tmp_path / "mine"))
    why = change(destination)
    before = content(tmp_path / "mine") if change != _a_mark_that_is_a_pipe else {}
    with pytest.raises(ModelError, match="is not replaced, as") as error:
        put(run, destination)
    assert str(error.value) == (
        f"{destination} is not replaced, as {f'it holds {why}' if why.endswith('wrote') else why}: export to another "
        "path, or move it away"
    )
    assert not before or content(tmp_path / "mine") == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_model_that_only_looks_like_an_export_is_not_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Today's loss: a directory of the user with a config.json in it was deleted."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (mine / name).write_text("mine")
    before = content(mine)
    assert export_command.main([str(run), str(mine)]) == 2
    assert capsys.readouterr().err == (
        f"error: {mine} is not replaced, as no export made it (it has no {MARK_FILE}): export to another path, or move "
        "it away\n"
    )
    assert content(mine) == before


def test_an_export_replaces_an_export(run: Path, exported: Path, tmp_path: Path) -> None:
    destination = Path(shutil.copytree(exported, tmp_path / "export"))
    (destination / "model.safetensors").unlink()  # what is gone is not lost by replacing the rest
    put(run, destination)
    assert content(destination) == content(exported)
    check_replaceable(destination, adopt=False)
    (tmp_path / "empty").mkdir()
    put(run, tmp_path / "empty")
    assert content(tmp_path / "empty") == content(exported)


@pytest.mark.parametrize("place", ["export", "exports/step-00000006", "elsewhere"])
def test_an_export_of_an_older_version_is_adopted_once(
    run: Path, exported: Path, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the run's own places for exports, and elsewhere if its card has the hash of the same run."""
    destination = tmp_path / "elsewhere" if place == "elsewhere" else run / place
    shutil.copytree(exported, destination, ignore=shutil.ignore_patterns(MARK_FILE))
    if place != "elsewhere":
        (destination / "README.md").write_text("a card that another version wrote")
    with caplog.at_level(logging.WARNING):
        put(run, destination)
        assert [r.message for r in caplog.records] == [
            f"{destination}: the export of an older version, which left no mark, is replaced"
        ]
        caplog.clear()
        put(run, destination)
    assert not caplog.records and content(destination) == content(exported)


@pytest.mark.parametrize("place", ["export", "elsewhere"])
def test_a_stranger_in_an_older_export_is_not_replaced(run: Path, exported: Path, place: str, tmp_path: Path) -> None:
    destination = tmp_path / "elsewhere" if place == "elsewhere" else run / place
    shutil.copytree(exported, destination, ignore=shutil.ignore_patterns(MARK_FILE))
    (destination / "model.gguf").write_text("an hour of work")
    with pytest.raises(ModelError, match=r"as it holds model\.gguf, which no export writes: export to another path"):
        put(run, destination)
    assert (destination / "model.gguf").read_text() == "an hour of work"


def test_a_run_says_before_it_trains_that_its_export_will_not_be_replaced(tmp_path: Path) -> None:
    config = make_config(tmp_path, export={"at_end": True})
    place = check_first(config, 1)
    place.export.mkdir(parents=True)
    (place.export / "model.gguf").write_text("an hour of work")
    with pytest.raises(ModelError, match="is not replaced, as no export made it"):
        check_first(config, 1)
    put_mark(place.export)
    check_first(config, 1)
    assert check_first(make_config(tmp_path, export={"at_end": False}), 1) == place


def test_only_known_files_travel(run: Path, tmp_path: Path) -> None:
    model = run / "model"
    for name in ("secrets.env", "notes.txt", "evil.py", ".netrc", "optimizer.pt"):
        (model / name).write_text("private")
    (model / "cache").mkdir()
    (model / "cache" / "config.json").write_text("private")
    for name in ("LICENSE", "NOTICE.txt", "USE_POLICY.md", "chat_template.jinja"):
        (model / name).write_text("public")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("public")
    put(run, tmp_path / "export")
    assert set(content(tmp_path / "export")) == {
        "LICENSE", "NOTICE.txt", "USE_POLICY.md", "chat_template.jinja", "additional_chat_templates/rag.jinja",
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md",
        "model.safetensors", MARK_FILE,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "LICENSE", "additional_chat_templates", ""])
def test_links_in_a_run_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    """A stranger's run directory could have them lead to any file of this machine."""
    path, elsewhere = run / "model" / name if name else run / "model", tmp_path / "private"
    if path.exists():
        path.rename(elsewhere)
    elif name == "LICENSE":
        elsewhere.write_text("private")
    else:
        elsewhere.mkdir()
    path.symlink_to(elsewhere)
    for read in (export_command.main, _generate):
        assert read([str(run), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def _generate(arguments: list[str]) -> int:
    from raytune_fsdp.cli import generate

    return generate.main([arguments[0], "w1", "--max-new-tokens", "1"])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pipe_in_a_run_is_not_waited_for(run: Path, tmp_path: Path, name: str) -> None:
    (run / "model" / name).unlink()
    os.mkfifo(run / "model" / name)
    for read in (export_command.main, _generate):
        assert read([str(run), str(tmp_path / "out")]) == 2


def test_a_checkpoint_without_its_run_says_what_is_missing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone" / "checkpoints"
    shutil.copytree(run / "checkpoints", alone)
    (step,) = alone.iterdir()
    for read in (export_command.main, _generate):
        assert read([str(step), str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == (
            f"error: {step} is without its run: {alone.parent / 'model'} should be a directory with the run's "
            "config.json and tokenizer; copy model/ of the run there\n"
        )
    shutil.copytree(run / "model", alone.parent / "model")  # the way out
    assert export_command.main([str(step), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("broken", ["", "{", "[]", "\xff", '"x"'])
def test_a_broken_config_is_one_line(
    run: Path, tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model" / "config.json").write_bytes(broken.encode("latin-1"))
    for read in (export_command.main, _generate):
        assert read([str(run), str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(run / "model" / "config.json") in line or str(run / "model") in line


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "", "a\0b", "..\\b"])
def test_names_in_a_weight_index_are_read_as_text(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="names .*, which is not a file in its directory: download it again"):
        find_weights(tmp_path)


def test_weights_behind_links_are_those_of_the_hubs_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1f").write_text("weights")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    (snapshot / "model.safetensors").symlink_to(tmp_path / "blobs" / "1f")
    assert find_weights(snapshot).sizes() == {"model.safetensors": 7}
