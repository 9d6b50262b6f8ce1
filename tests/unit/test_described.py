"""What trackers are told of a run besides its numbers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from raytune_fsdp.run.described import commit_here


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
