"""What a terminal shows of a run, as text for the docs.

    python -m tests.captures 80 > docs/images/terminal-80.txt

Trains the demo for a few steps without Ray, on a terminal of our own (tests/terminal.py), and prints three moments.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.terminal import Session, on_terminal

ROOT = Path(__file__).parents[1]
FIELDS = {
    "run.name": "demo", "cluster.launch": "local", "cluster.workers": "1", "train.epochs": "6", "eval.every": "20",
    "checkpoint.every": "20", "tracking.mlflow.enabled": "false",
}  # fmt: skip


def main(columns: int) -> None:
    with tempfile.TemporaryDirectory() as storage:
        flags = [word for name, value in FIELDS.items() for word in (f"--{name}", value)]
        command = [sys.executable, str(ROOT / "jobs" / "finetune.py"), *flags, "--run.storage", storage]
        with on_terminal(command, columns, rows=40, cwd=ROOT) as session:
            session.shows("s  first step", 300)
            show("Before the first step", session, columns, storage)
            session.shows("demo  step 2", 300)
            session.until(lambda: any("eval " in line for line in session.screen.lines) and bar(session) > 20, 300)
            show("While it trains", session, columns, storage)
            code = session.end(300)
            show(f"At its end (exit code {code})", session, columns, storage)


def bar(session: Session) -> int:
    """The step that the region shows."""
    found = [line for line in session.screen.shown if line.startswith("demo  step ")]
    return int(found[-1].split()[2].split("/")[0]) if found else 0


def show(title: str, session: Session, columns: int, storage: str) -> None:
    text = "\n".join(session.screen.shown).replace(storage, "runs").rstrip()
    print(f"{title}, {columns} columns:\n\n{text}\n", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
