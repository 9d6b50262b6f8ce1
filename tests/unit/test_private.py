"""What a run writes about itself is for its owner and group; what it makes for others, others may read."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytune_fsdp.base.durable import take_from_others
from raytune_fsdp.record.jsonl import append_evaluation, append_event, read_events
from raytune_fsdp.record.repair import truncate
from tests.ranks import resident_ranks
from tests.runs import make_config, train_rank

OLDER = Path(__file__).parents[1] / "fixtures" / "aae7294"
FOR_OTHERS = ("checkpoints/", "model/", "export/", "mlflow_run_id")
"""How the names begin of what others may read. Of model/, not the recipe."""


@pytest.fixture(params=[(0o022, 0o640), (0o002, 0o660), (0, 0o660)], ids=["umask 022", "umask 002", "umask 0"])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode of a private file under a umask: groups keep what it gives them."""
    umask, mode = request.param
    before = os.umask(umask)
    yield mode
    os.umask(before)


def open_to_others(run: Path) -> list[str]:
    """The files of a run that every user of the machine can open, by their modes and those of the directories."""
    found = []
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        folders = [folder for folder in file.parents if run in folder.parents]
        if file.stat().st_mode & stat.S_IROTH and all(folder.stat().st_mode & stat.S_IXOTH for folder in folders):
            found.append(str(file.relative_to(run)))
    return found


def test_the_record_is_private(tmp_path: Path, mode: int) -> None:
    append_event(tmp_path / "events.jsonl", "saved", attempt=1, fields={})
    append_evaluation(tmp_path / "evaluations.jsonl", 1, {"eval/loss": 1.0}, attempt=1)
    (tmp_path / "metrics.jsonl").write_text("broken\n")
    truncate(tmp_path / "metrics.jsonl", 1, aside=tmp_path / "metrics.jsonl.a1.damaged")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(
        ("events.jsonl", "evaluations.jsonl", "metrics.jsonl", "metrics.jsonl.a1.damaged"), mode
    )


def test_a_report_in_its_run_is_private_and_one_elsewhere_as_the_umask_has_it(tmp_path: Path, mode: int) -> None:
    from raytune_fsdp.cli import report

    run = shutil.copytree(OLDER / "runs" / "steps", tmp_path / "run")
    assert report.main([str(run)]) == 0 and report.main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (run / "report" / "index.html").stat().st_mode & 0o777 == mode
    assert not (run / "report").stat().st_mode & 0o007
    assert (tmp_path / "page.html").stat().st_mode & 0o004


def test_others_read_nothing_of_what_a_run_writes_about_itself(tmp_path: Path) -> None:
    """A run of an older version, all of it for everybody, and a new one."""
    from raytune_fsdp.record.report.page import make_curve, make_report

    config = make_config(tmp_path, train={"max_steps": 2}, tracking={"documents": True}, checkpoint={"every": 1})
    resident_ranks(train_rank, 1, config.model_dump(), 1)
    run = tmp_path / "runs" / "run"
    make_curve(run), make_report(run)
    strange = [name for name in open_to_others(run) if not name.startswith(FOR_OTHERS) or name.endswith("recipe.json")]
    assert strange == []
    assert {"model/config.json", "checkpoints/step-00000001.a1/manifest.json"} <= set(open_to_others(run))
    (started,) = read_events(run / "attempts.jsonl")
    command = started["fields"]["command"].encode()
    having = [file.relative_to(run) for file in run.rglob("*") if file.is_file() and command in file.read_bytes()]
    assert command and {*map(str, having)} <= {"attempts.jsonl", "report/index.html"}, "it is neither sent nor exported"
    groups = [file for file in run.rglob("*") if not file.stat().st_mode & stat.S_IRGRP]
    assert groups == [], "groups keep what they have"

    for path in run.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert "events.jsonl" in open_to_others(run) and "model/recipe.json" in open_to_others(run)
    resident_ranks(train_rank, 1, config.model_dump(), None)
    strange = [name for name in open_to_others(run) if not name.startswith(FOR_OTHERS) or name.endswith("recipe.json")]
    assert strange == []


def test_a_directory_keeps_the_bit_that_gives_its_group_to_files(tmp_path: Path) -> None:
    shared = tmp_path / "report"
    shared.mkdir()
    shared.chmod(0o2775)
    take_from_others(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o2770
