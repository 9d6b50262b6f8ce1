"""What trackers are told of a run besides its numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raytune_fsdp.run.described import commit_here, started_by


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_here() is None, "no repository"

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *names, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert commit_here() is None, "no commit"
    git("commit", "-q", "--allow-empty", "-m", "a")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert commit_here() == git("rev-parse", "HEAD")
    monkeypatch.setenv("PATH", "")
    assert commit_here() is None, "no git"


def test_a_note_about_the_surroundings_never_stops_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (tmp_path / "git").write_text(
        "#!/bin/sh\nprintf ' M caf\\351\\n'\n"
    )  # a name in Latin-1, with core.quotePath=false
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = started_by()
    assert found["directory"] is None and found["uncommitted"] is True


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-c", "import os; os.environ.update({'WANDB_API_KEY': 'hunter2 hunter2'})"],
        ["--cluster.env.HF_TOKEN", "'hunter2'hunter2"],
        ["--cluster.env.X_TOKEN=it's hunter2"],
        ["--cluster.env.HF_TOKEN", "one hunter2"],
        ["--model.path", "http://user:p'hunter2@host/model"],
    ],
)
def test_a_command_is_kept_without_its_secrets(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["raytune-fsdp", "train", *words, "--optim.lr", "1e-4"])
    command = started_by()["command"]
    assert (
        "hunter2" not in command and command.endswith("--optim.lr 1e-4") and command.startswith("raytune-fsdp train ")
    )
