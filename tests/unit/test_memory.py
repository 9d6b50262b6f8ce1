"""What a step of an 8B needs on one card, counted on tensors without memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_an_8b_fits_one_card(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.memory", "--modes", "selective", "--out", str(tmp_path / "memory.json")]
    subprocess.run([sys.executable, *command], check=True, cwd=Path(__file__).parents[2], timeout=500)
    parts = json.loads((tmp_path / "memory.json").read_text())["modes"]["selective"]
    assert parts["total with fp32 moments"] <= 126
    assert parts["total with 8-bit moments"] <= 82
