"""docs/start/python.md, as it stands: run in an empty directory, and type-checked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from raytune_fsdp.demo import CONVERSATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_in_python_runs_and_type_checks(tmp_path: Path) -> None:
    scripts = re.findall(r"```python\n(.*?)```", (ROOT / "docs/start/python.md").read_text(), re.DOTALL)
    assert len(scripts) == 3
    for name, script in zip(("train.py", "my_code.py", "own.py"), scripts, strict=True):
        (tmp_path / name).write_text(script)
    (tmp_path / "mine.jsonl").write_text("".join(CONVERSATIONS.read_text().splitlines(keepends=True)[:40]))
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "runs/first" in ran.stdout and "'attempt_started'" in ran.stdout and "heldout" in ran.stdout
    assert "optim.learning_rate=0.0001: unknown field; here it is optim.lr" in ran.stdout
    own = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert own.returncode == 0, own.stderr[-3000:]
    assert "TanhLlama " in own.stdout
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", "train.py", "own.py", "my_code.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
