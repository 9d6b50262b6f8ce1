"""Forged files of whole runs, read by the commands themselves; links, places and names have tests of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile_runs import HOSTILE, change, check_all, project, without_places
from tests.measured import changes, measured, opening, snapshot, touching
from tests.ranks import run_ranks


@pytest.mark.parametrize("kind", ["besides", "few configs", "few records"])
def test_commands_end_in_one_line_whatever_somebody_has_put_into_a_run(kind: str, tmp_path: Path) -> None:
    check_all(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoints", "configs", "records"])
def test_every_command_that_reads_a_forged_file_ends_in_one_line(kind: str, tmp_path: Path) -> None:
    check_all(kind, tmp_path)


def test_there_are_many_hostile_runs() -> None:
    assert (
        len(
            {
                name
                for kind in ("links", "places", "names", "checkpoints", "configs", "records")
                for name in HOSTILE[kind]
            }
        )
        > 250
    )


def looked_at(sandbox: Path) -> tuple[list[str], ...]:
    """What is seen of a command that goes where it is sent, of another process, and of an address."""
    import socket

    from raytune_fsdp.cli.main import main

    run = project(sandbox)
    without_places(run)
    there = sandbox / "there"
    there.mkdir()
    (run / "texts.jsonl").rename(there / "rows.jsonl")
    change(run, ("data", "train", 0, "path"), to=str(there / "rows.jsonl"))
    before = snapshot(sandbox)
    with opening(there) as seen, touching([sandbox / name for name in ("project", "home", "temporary")]) as touched:
        ending = measured(lambda: main(["step", str(run), "1", "--trust-places"]))
        opened = seen()
        with socket.socket() as other:
            other.connect_ex(("127.0.0.1", 9))
    assert ending.code == 0, ending
    with opening(there) as seen:
        subprocess.run([sys.executable, "-c", f"open({str(there / 'rows.jsonl')!r}).read()"], check=True)
        by_another = seen()
    return opened, touched, by_another, changes(before, snapshot(sandbox))


def test_whoever_goes_elsewhere_is_seen(tmp_path: Path) -> None:
    """Else all refusals would prove nothing."""
    ((opened, touched, by_another, changed),) = run_ranks(looked_at, 1, tmp_path)
    rows = str(tmp_path / "there" / "rows.jsonl")
    assert f"opened {rows}" in opened and f"open {rows}" in touched and f"opened {rows}" in by_another
    assert "socket.connect address ('127.0.0.1', 9)" in touched
    assert any("cache" in each for each in changed)
