"""Ctrl-C at any moment leaves a terminal as it should be: what was printed stays, and nothing of the region."""

from __future__ import annotations

import re
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from tests.config_text import dump_config
from tests.ray.jobs import ROOT, TEMPORARY
from tests.runs import make_config
from tests.terminal import Session, on_terminal

pytestmark = pytest.mark.slow

MOMENTS = {
    "local": [0.2, 0.6, 1.2, 2, 3, 4, 5, 6.5, 8, 10, 13, 17, 22],
    "ray": [1, 3, 5, 7, 9, 11, 14, 17, 21, 26, 33, 41],
}
"""Seconds after the start; the last ones come while it trains, saves, measures and answers."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launch", "columns"), [("local", 80), ("local", 160), ("ray", 80)])
def test_ctrl_c_in_every_phase(tmp_path: Path, launch: str, columns: int) -> None:
    sections: dict[str, Any] = {
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 100_000},
        "eval": {"every": 50, "prompts": ["w5 w6"]},
        "checkpoint": {"every": 20},
        "tracking": {"console": True, "mlflow": {"enabled": True}},
        "cluster": {"launch": launch, "workers": 2, "device": "cpu"},
        "export": {"at_end": True},
    }
    file, trained = tmp_path / "config.yaml", 0
    for moment in MOMENTS[launch]:
        file.write_text(dump_config(make_config(tmp_path, **sections)))
        command = [sys.executable, str(ROOT / "jobs" / "finetune.py"), "--config", str(file)]
        with on_terminal(
            command, columns, rows=40, cwd=tmp_path,
            PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", RAY_ADDRESS="local", TMPDIR=str(TEMPORARY),
        ) as session:  # fmt: skip
            before = termios.tcgetattr(session.terminal)
            deadline = time.monotonic() + moment
            while time.monotonic() < deadline:
                session.read(0.05)
            where = "\n".join(session.screen.shown)
            session.press(b"\x03")
            code = session.end(120)
            print(f"--- Ctrl-C after {moment} s:\n{session.screen.text}\n", flush=True)
            assert termios.tcgetattr(session.terminal) == before
        trained += "step " in where
        check(session, code)
    assert trained >= 2, "no moment came while it trained"


def check(session: Session, code: int) -> None:
    screen = session.screen
    assert code == 130, screen.text
    assert not re.search("Traceback|[█░]", screen.text), screen.text
    assert screen.cursor[1] == 0, "the prompt of the shell comes on a line of its own"
    (said,) = [line for line in screen.lines if "stopped" in line or "interrupted" in line][-1:]
    assert said, screen.text
