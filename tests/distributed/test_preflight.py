"""A run that cannot fit, as a person meets it: refused before anything is written, trained with `--force`."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.launch import local
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from tests.distributed.test_launch import write_config


def test_what_cannot_fit_is_refused_and_can_be_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, cluster={"launch": "local", "device": "cpu", "workers": 1})
    monkeypatch.setattr(local, "memory_of", lambda device: 100_000)
    assert main(["train", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the run does not fit: a rank keeps 348,784 bytes of weights"), said
    assert "--force starts it all the same" in said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["cache"]
    assert main(["train", "--config", str(config), "--force"]) == 0
    capsys.readouterr()
    events = {event["event"]: event["fields"] for event in read_events(tmp_path / "runs" / "run" / "events.jsonl")}
    assert events["prediction_checked"]["kept_error"] == 0
    assert len(read_trajectory(tmp_path / "runs" / "run" / "metrics.jsonl")) == 6
    # A run that is complete is asked for nothing.
    assert main(["train", "--config", str(config)]) == 0
