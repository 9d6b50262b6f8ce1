"""Names of directories, files and datasets are a stranger's, too: no command prints one that steers a terminal."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raytune_fsdp.base.untrusted import printable_json, without_controls
from tests.hostile_runs import CHECKPOINT, OLDER, check_all

NAME = "st\u202eeps\u2066\x1b]0;owned\x07\x9b31m"
"""It reverses what follows, gives the window a title, and colours the rest."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(OLDER, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return (tmp_path / "project" / "runs" / "steps").rename(tmp_path / "project" / "runs" / NAME)


def printed(capfd: pytest.CaptureFixture[str], command: str, *arguments: object) -> str:
    importlib.import_module(f"raytune_fsdp.cli.{command}").main([*map(str, arguments)])
    out, err = capfd.readouterr()
    raw = sorted({char for char in out + err if not char.isprintable() and char not in "\n\t"})
    assert not raw, (command, raw, out + err)
    return out + err


def test_no_command_prints_the_control_characters_of_a_name(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = run.parent / f"out{NAME}"
    for command, *arguments in (
        ("report", run), ("report", run, run.parent / "epochs", "--out", f"{out}.html"), ("watch", run),
        ("runs", run.parent),
        ("runs", out), ("runs", run.parent, "--json"), ("logs", run), ("diff", run, run.parent / "epochs"),
        ("checkpoint", "list", run), ("checkpoint", "verify", run), ("checkpoint", "now", run, "--wait", 0),
        ("export", run, out), ("average", run, out), ("step", run, 1, "--trust-places"),
        ("step", run, 7, "--loss", "--trust-places"),
        ("step", run, 7, "--json", "--trust-places"), ("eval", run), ("convert", f"{out}.yaml"),
    ):  # fmt: skip
        assert printed(capfd, str(command), *arguments).strip(), command


@pytest.mark.parametrize(("each", "many"), [(5, 60), pytest.param(None, 200, marks=pytest.mark.slow)])
def test_every_command_says_in_one_line_what_it_has_to_say_of_a_name(
    tmp_path: Path, each: int | None, many: int
) -> None:
    """Of runs whose names have line ends, too, which would begin a line of their own, and of checkpoints. `each`: so
    many commands have a name to say."""
    assert check_all("names", tmp_path, each=each) > many


def test_data_commands_print_no_control_characters_of_datasets(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = run.parents[1] / f"rows{NAME}.jsonl"
    shutil.copy(OLDER / "data" / "texts.jsonl", data)
    data.open("a").write('{"text": 7}\n')
    arguments = ("--config", run / "config.yaml", "--data.train.0.path", data, "--trust-places")
    skip = ("--data.bad_rows", "skip")
    assert "rows" in printed(capfd, "data", "preview", *arguments, *skip)
    assert "rows" in printed(capfd, "data", "stats", *arguments, *skip)
    assert "rows" in printed(capfd, "data", "stats", *arguments)  # refused, naming the row


def test_warnings_print_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from raytune_fsdp.launch.quiet import log_warnings

    before = logging.root.handlers[:]
    monkeypatch.setattr(logging.root, "handlers", [])
    log_warnings(for_all=True)
    logging.getLogger("x").warning("%s is damaged", NAME)
    logging.root.handlers[:] = before
    said = capfd.readouterr().err
    assert said.startswith("WARNING x: st") and said.endswith(" is damaged\n") and said.rstrip("\n").isprintable()


def test_a_command_that_sets_up_no_logging_prints_no_control_characters_in_warnings(run: Path) -> None:
    """Of a run that goes back to an older checkpoint, as a process of its own: pytest has set up logging here."""
    newer = Path(shutil.copytree(run / CHECKPOINT, run / "checkpoints" / "step-00000007.a1"))
    (newer / "state.json").write_text("{}")
    found = "from raytune_fsdp.checkpoint.catalogue import newest; import sys; newest(sys.argv[1], hashes=True)"
    program = f"from raytune_fsdp.cli.common import exit_code\ndef work():\n  {found}\n  return 0\nexit_code(work)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(run / "checkpoints")], capture_output=True, text=True, check=True
    )
    assert "is damaged" in done.stderr and done.stderr.rstrip("\n").isprintable(), done.stderr


def test_a_line_of_json_says_the_same() -> None:
    line = json.dumps({"row": f"{NAME}, row 3", "text": "Käse 你好 \u00a0"}, ensure_ascii=False)
    assert json.loads(printable_json(line)) == json.loads(line)
    assert printable_json(line).isprintable() and "你好" in printable_json(line)


def test_an_answer_keeps_its_letters_and_loses_what_steers_a_terminal() -> None:
    family, persian = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "می\u200cخواهم"
    assert without_controls(f"{family} {persian}\n\tok") == f"{family} {persian}\n\tok"
    assert without_controls("a\x1b[2J\x07b\u202ec\rd") == "a·[2J·b·c·d"
