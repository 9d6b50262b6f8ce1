"""`raytune-fsdp data`: what a person sees of the data."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import pip_install
from raytune_fsdp.cli import main
from raytune_fsdp.demo import TOKENIZER
from tests.config_text import dump_config
from tests.runs import make_config

CHAT = [
    {"messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}]}
    for i in range(6)
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Six conversations and two broken rows to train on, two to evaluate on, and a text beside them."""
    rows = "".join(json.dumps(row) + "\n" for row in CHAT)
    (tmp_path / "chat.jsonl").write_text(rows + '{"messages": []}\n{"turns": 1}\n')
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHAT[:2]))
    (tmp_path / "text.txt").write_text("A line of text.\nAnother one.\n")
    made = make_config(
        tmp_path,
        model={
            "init": "random",
            "architecture": {**make_config(tmp_path).model.architecture, "vocab_size": 1024},  # type: ignore[dict-item]
            "tokenizer": str(TOKENIZER),
        },
        data={
            "train": [
                {"path": str(tmp_path / "chat.jsonl")},
                {"path": str(tmp_path / "text.txt"), "format": {"type": "completion"}, "weight": 2},
            ],
            "eval": [{"path": str(tmp_path / "held.jsonl")}],
            "bad_rows": "skip",
        },
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(made))
    return path


def run(*arguments: object) -> int:
    return main.main(["data", *map(str, arguments)])


def test_preview_marks_what_is_trained_on(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("preview", "--config", config, "--samples", 3) == 0
    shown = capsys.readouterr().out
    assert "sample 3: " in shown and "-- document 1, " in shown and "\033" not in shown
    assert "<|user|>Question" in shown and "«Answer" in shown and "«A line" not in shown
    assert ".<|endoftext|>»" in shown
    assert run("preview", "--config", config, "--eval", "held", "--samples", 1) == 0
    assert ", held: " in capsys.readouterr().out
    assert run("preview", "--config", config, "--eval", "hold") == 2
    assert "--eval hold: no evaluation dataset has this name; nearest: held; all: held" in capsys.readouterr().err


def test_stats_count(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", "--config", config) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line[:1].isalpha()}
    assert lines["chat"][1:3] == ["8", "6"] and lines["text"][1:3] == ["4", "4"] and lines["all"][1:3] == ["12", "10"]
    assert "dropped from chat: 1 missing_column" in shown and "dropped from chat: 1 empty" in shown
    assert f"{tmp_path / 'chat.jsonl'}:8: has no column 'messages'" in shown
    assert "eval held: an epoch in 1 window(s)" in shown and "documents by length in tokens" in shown


def test_stats_draw(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("stats", "--config", config, "--png", tmp_path / "out" / "lengths.png") == 0
    assert (tmp_path / "out" / "lengths.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_drawn_is_not_counted(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("stats", "--config", config, "--png", "lengths.png") == 2
    shown, problem = capsys.readouterr()
    assert problem == f"error: --png lengths.png: matplotlib is not installed: {pip_install('plots')}\n"
    assert shown == ""


def test_clean_spares_what_was_used_lately(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", "--config", config) == 0
    cache = tmp_path / "runs" / "cache"
    windows = list(cache.rglob("*.arrow"))
    assert len(windows) == 2
    os.utime(windows[0], (1, 1))
    capsys.readouterr()
    assert run("clean", cache, "--dry-run") == 0
    assert "would remove 1 prepared files and windows" in capsys.readouterr().out and windows[0].exists()
    assert run("clean", cache) == 0
    assert not windows[0].exists() and windows[1].exists()
    assert run("clean", cache, "--unused-days", 0) == 0
    assert list(cache.iterdir()) == [cache / "files"] and not [p for p in (cache / "files").iterdir() if p.is_dir()]
    capsys.readouterr()
    assert run("clean", tmp_path / "nowhere") == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    assert run("clean", cache, "--keep-gb", -1) == 2
    assert "--keep-gb -1 must be a number >= 0" in capsys.readouterr().err


def test_the_three_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prevew") == 2
    assert "unknown command data prevew; nearest: preview; commands: preview, stats, clean" in capsys.readouterr().err
    assert run("--help") == 0 and "preview" in capsys.readouterr().out
