"""Scripts of users that start ranks, of which each imports the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raytune_fsdp.launch.imported import STARTING, leave_if_imported
from tests.runs import make_config

SCRIPT = """
from raytune_fsdp import finetune
finetune("run.yaml")
"""


def test_only_ranks_that_are_being_started_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another thread of the process that starts them, nor a command that this process runs."""
    gone: list[int] = []
    monkeypatch.setattr(os, "_exit", gone.append)
    for pid in (os.getpid(), os.getppid()):
        monkeypatch.setenv(STARTING, f"{pid}:/nowhere")
        leave_if_imported()
    assert gone == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "script.py",
            "each rank is a new process that imports your script, which calls finetune() again: put the call ",
        ),
        ("-", "a script from standard input cannot start several ranks on this machine, because each imports it: save"),
    ],
)
def test_a_script_that_ranks_cannot_import_ends_and_says_what_to_change(tmp_path: Path, name: str, said: str) -> None:
    config = make_config(tmp_path, cluster={"launch": "local", "device": "cpu", "workers": 2}).model_dump(mode="json")
    # More than a pipe holds: the process that starts ranks must not wait for one that has gone.
    config["cluster"]["env"] = {"MUCH": "x" * 200_000}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, name], input=SCRIPT, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    last = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1 and said in last, ran.stderr
    assert len(ran.stderr.splitlines()) < 40, "no traces of ranks"
