"""Links inside a run are refused before anything is read or written through them, and names are exactly ours."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raytune_fsdp.base.durable import replace_durably
from raytune_fsdp.base.errors import ModelError, ResumeError
from raytune_fsdp.checkpoint.catalogue import committed, looks_like_checkpoint, newest
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.on_demand import Requests
from raytune_fsdp.checkpoint.storage import PosixStorage
from raytune_fsdp.model.adapters.config_file import read_adapter_config
from raytune_fsdp.model.directory.bounds import check_tokenizer_files
from raytune_fsdp.model.directory.known_files import ADAPTER_CONFIG_FILE, CONFIG_FILE, SEEING_FILES
from raytune_fsdp.model.export.mark import new_export
from raytune_fsdp.model.export.write import ExportForm, _put_form
from raytune_fsdp.plan.run_dir import check_links
from tests.hostile_runs import CHECKPOINT, NOT_OURS, OLDER, check_all, linked


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of an older tree, in its place."""
    shutil.copytree(OLDER, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project" / "runs" / "steps"


def said(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> str:
    """The one line in which a command refuses."""
    code = importlib.import_module(f"raytune_fsdp.cli.{command}").main([*map(str, arguments)])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].isprintable(), (command, code, lines)
    return lines[0]


@pytest.mark.parametrize(("each", "many"), [(4, 120), pytest.param(None, 500, marks=pytest.mark.slow)])
def test_a_link_in_a_run_is_refused_by_name_and_nothing_is_touched_behind_it(
    tmp_path: Path, each: int | None, many: int
) -> None:
    """By every command: in one line, at once, and without a look at what is there. `each`: so many commands meet each
    link."""
    assert check_all("links", tmp_path, each=each) > many


@pytest.mark.parametrize(("each", "many"), [(1, 30), pytest.param(None, 60, marks=pytest.mark.slow)])
def test_a_listing_names_the_run_with_a_link_and_shows_the_others(tmp_path: Path, each: int | None, many: int) -> None:
    assert check_all("listed", tmp_path, each=each) > many


def test_a_listing_shows_the_other_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from raytune_fsdp.cli import runs

    linked(run, "metrics.jsonl")
    assert runs.main([str(run.parent)]) == 2
    told = capsys.readouterr()
    assert "epochs" in told.out and "objects" in told.out and "steps " not in told.out
    assert told.err.count("\n") == 1 and str(run / "metrics.jsonl") in told.err


def commands_in(line: str) -> list[str]:
    return re.findall(r"`([^`]*)`", line)


@pytest.mark.parametrize("where", ["elsewhere", "steps", "storage/steps/checkpoints", "with space/it's"])
def test_the_way_over_for_checkpoints_elsewhere_works(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Both ways: with `checkpoint.storage`, and back into the run."""
    target = tmp_path / where
    target.parent.mkdir(parents=True, exist_ok=True)
    (run / "checkpoints").rename(target)
    (run / "checkpoints").symlink_to(target)
    line = said(capsys, "checkpoint", "list", run)
    over, back = commands_in(line)
    kept = shutil.copytree(run.parent.parent, tmp_path / "kept", symlinks=True)
    subprocess.run(over, shell=True, check=True)
    storage = re.search(r"checkpoint\.storage: (.+), which", line)
    assert storage is not None and not (run / "checkpoints").exists()
    from raytune_fsdp.config.load import load_config
    from raytune_fsdp.run.checks import check_first

    config = load_config(run / "config.yaml", ["--checkpoint.storage", storage[1]])
    place = check_first(config, 1)
    assert [found.step for found in committed(place.checkpoints)] == [6]
    assert (kept / "runs" / "steps" / "checkpoints").is_symlink()
    # The other one, of the same beginning.
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(place.checkpoints, target)
    (run / "checkpoints").symlink_to(target)
    subprocess.run(back, shell=True, check=True)
    check_links(run)
    assert [found.step for found in committed(str(run / "checkpoints"))] == [6] and not target.exists()


@pytest.mark.parametrize("name", ["report", "model", "metrics.jsonl", "model/config.json"])
def test_the_way_over_for_all_else_works(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    linked(run, name)
    (command,) = commands_in(said(capsys, "report", run))
    subprocess.run(command, shell=True, check=True)
    check_links(run)
    assert (run / name).exists() and not (run / name).is_symlink()


def test_links_at_and_above_a_run_stay_allowed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from raytune_fsdp.cli import checkpoint, report

    (run.rename(tmp_path / "far"), run.symlink_to(tmp_path / "far"))
    (run.parent.rename(tmp_path / "all"), (tmp_path / "project/runs").symlink_to(tmp_path / "all"))
    (run / "notes").symlink_to(tmp_path)  # no name of ours
    assert checkpoint.main(["verify", str(run)]) == 0 and report.main([str(run)]) == 0
    assert "intact" in capsys.readouterr().out and (tmp_path / "far" / "report" / "index.html").is_file()


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_name_counts_only_if_it_is_what_we_write(run: Path, name: str) -> None:
    root = run / "checkpoints"
    shutil.copytree(run / CHECKPOINT, root / name)
    found, damaged = newest(str(root), hashes=True)
    assert found is not None and found.name == "step-00000006.a1" and not damaged
    assert not looks_like_checkpoint(str(root / name))


def test_a_name_that_is_not_ours_does_not_block_a_resume(run: Path) -> None:
    """`step-00000099.a01` was taken for the newest checkpoint, and could not be found under the name it would have."""
    from tests.ranks import resident_ranks
    from tests.runs import train_rank

    shutil.copytree(run / CHECKPOINT, run / "checkpoints" / "step-00000099.a01")
    from raytune_fsdp.config.load import load_config

    config = load_config(run / "config.yaml", ["--train.max_steps", "7"])
    resident_ranks(train_rank, 1, config.model_dump(), None)
    assert [found.name for found in committed(str(run / "checkpoints"))] == ["step-00000006.a1", "step-00000007.a2"]
    assert (run / "checkpoints" / "step-00000099.a01").is_dir()


OURS = ["step-00000001.a1.7.tmp", "step-00000001.a1.tmp", "step-123456789.a12.3.tmp"]
THEIRS = ["notes.tmp", ".tmp", "step-00000001.a01.tmp", "step-1.a1.tmp", "step-00000001.a1.\u0661.tmp", "thesis"]


def test_cleaning_removes_only_names_of_our_own_pattern(tmp_path: Path) -> None:
    for name in (*OURS, *THEIRS):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    PosixStorage(str(tmp_path)).clean()
    assert {path.name for path in tmp_path.iterdir()} == set(THEIRS)
    assert all((tmp_path / name / "file").is_file() for name in THEIRS)


def test_cleaning_an_object_store_removes_only_names_of_our_own_pattern(tmp_path: Path) -> None:
    for name in ("step-00000001.a1", "step-00000001.a01", "notes", "step-00000002.a1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-00000002.a1" / "manifest.json").write_text("{}")
    (tmp_path / "notes" / "x.damaged").write_text("x")
    storage = ObjectStorage(f"file://{tmp_path}")
    storage.clean()
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001.a01", "notes", "step-00000002.a1"}
    assert not storage.has_damaged()


def test_only_what_we_set_aside_counts_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "thesis.damaged").mkdir()
    assert newest(str(tmp_path), hashes=True) == (None, {})
    (tmp_path / "step-00000001.a1.2.damaged").mkdir()
    with pytest.raises(ResumeError, match="every checkpoint is damaged"):
        newest(str(tmp_path), hashes=True)


def test_an_export_removes_only_what_an_export_left(tmp_path: Path) -> None:
    import socket

    host = socket.gethostname()
    ours, theirs = f".out.export-{host}-99999999-abcdef", [
        f".out.export-{host}-my-thesis", f".out.export-{host}-99999999-thesis", f".out.exports-{host}-99999999-abcdef",
    ]  # fmt: skip
    for name in (ours, *theirs):
        (tmp_path / name).mkdir()
    with new_export(tmp_path / "out", tmp_path / "model"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", *theirs}


def test_a_file_is_not_replaced_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "plan.json.tmp").symlink_to(tmp_path / "mine")
    replace_durably(tmp_path / "plan.json", "new")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "plan.json").read_text() == "new"


def test_a_request_that_is_a_link_is_not_answered_into_another_file(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    mine.write_text("export PATH=$HOME/bin:$PATH")
    (run / "checkpoint-now.x.asked").symlink_to(mine)
    requests = Requests(run)
    requests.take()
    requests.answer(6, "x", None)
    assert mine.read_text() == "export PATH=$HOME/bin:$PATH"


def test_an_adapter_in_the_cache_of_the_hub_is_read_through_its_links_and_no_other(tmp_path: Path) -> None:
    cached = tmp_path / "models--someone--adapter" / "snapshots" / f"{7:040x}"
    blob, secret = cached.parents[1] / "blobs" / f"{9:040x}", tmp_path / "secret.json"
    for place in (cached, blob.parent, tmp_path / "mine"):
        place.mkdir(parents=True)
    blob.write_text('{"peft_type": "LORA"}')
    secret.write_text('{"key": 1}')
    (cached / ADAPTER_CONFIG_FILE).symlink_to(blob)
    assert read_adapter_config(cached) == {"peft_type": "LORA"}
    (cached / ADAPTER_CONFIG_FILE).unlink()
    (cached / ADAPTER_CONFIG_FILE).symlink_to(secret)
    (tmp_path / "mine" / ADAPTER_CONFIG_FILE).symlink_to(blob)
    for place, rule in ((cached, "which may be no part of the model"), (tmp_path / "mine", "is a symbolic link")):
        with pytest.raises(ModelError, match=rule):
            read_adapter_config(place)


def test_an_export_takes_no_file_that_the_directory_of_its_base_only_links_to(tmp_path: Path) -> None:
    base, staging, secret = tmp_path / "base", tmp_path / "staging", tmp_path / ".docker" / "config.json"
    for place in (base, staging, secret.parent):
        place.mkdir()
    secret.write_text('{"auths": {"registry": "c2VjcmV0"}}')
    network = cast(Any, SimpleNamespace(config=SimpleNamespace(model_type="seeing")))
    for name in SEEING_FILES:
        (staging / CONFIG_FILE).write_text('{"model_type": "seeing"}')
        (base / name).symlink_to(secret)
        with pytest.raises(ModelError, match=f"{name} is a link to .*, which may be no part of the model"):
            _put_form(ExportForm(network=network, base_directory=base), staging)
        (base / name).unlink()
    assert [path.name for path in staging.iterdir()] == [CONFIG_FILE]


def test_links_in_a_circle_are_refused_instead_of_followed_for_ever(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("vocab.json")
    (tmp_path / "vocab.json").symlink_to("tokenizer.json")
    with pytest.raises(ModelError, match="json is a link that leads to no file"):
        check_tokenizer_files(tmp_path)
