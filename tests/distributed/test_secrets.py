"""Eighteen shapes of secrets in the config, the environment and URLs, and where they must not be found afterwards."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.copies import following
from raytune_fsdp.record.copies.mlflow import mlflow_installed
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.names import SETTINGS_CHANGED
from tests.config_text import dump_config
from tests.planted import FILL, SHAPES
from tests.runs import make_config

PASSWORD = "correctHorseBatteryStaple"
NEEDLES = [text.encode() for text in (*SHAPES.values(), FILL, PASSWORD)]


def leaks(directory: Path, *texts: str) -> list[str]:
    """Where a planted secret is: files below the directory, and texts by number."""
    places = {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    places |= {f"text {number}": text.encode() for number, text in enumerate(texts)}
    return [place for place, content in places.items() if any(needle in content for needle in NEEDLES)]


def test_planted_secrets_stay_out_of_everything_that_is_written_or_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    variables = {f"SETTING_{number}": secret for number, secret in enumerate(SHAPES.values())}
    variables |= {"DB_PASSWORD": PASSWORD, "AWS_SECRET_ACCESS_KEY": PASSWORD}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = make_config(
        tmp_path,
        parallel={"precision": "fp32"},
        train={"max_steps": 2, "global_batch": 4},
        optim={"schedule": {"type": "constant"}},  # it is extended below
        eval={"prompts": [f"say {' and '.join(SHAPES.values())}"], "max_new_tokens": 1},
        tracking={"console": True, "mlflow": {"enabled": mlflow_installed()}},
        cluster={"launch": "local", "device": "cpu", "env": {**variables, "PLAIN": "eth0"}},
        export={"at_end": True},
    )
    given, runs = tmp_path / "given.yaml", tmp_path / "runs"
    given.write_text(dump_config(config))

    def train(*flags: str) -> str:
        """Its output, after a look at everything that it may have written."""
        assert main(["train", f"--config={given}", *flags]) == 0
        shown = capfd.readouterr()
        assert leaks(runs, shown.out, shown.err) == []
        assert [path for path in private if path.exists() and path.stat().st_mode & stat.S_IRWXO] == []
        return shown.out

    written = runs / "run" / "config.yaml"
    private = [*RunDir.of(config).private, *([runs / "mlflow.db", runs / "mlartifacts"] if mlflow_installed() else [])]
    shown = train()
    assert "step 2/2" in shown and "asked: say <redacted> and <redacted>" in shown
    assert "PLAIN: eth0" in written.read_text() and "fine-tuned" in (runs / "run" / "export" / "README.md").read_text()

    # On with what was written, as an older version would have left it, and with a server that wants a password. (It
    # does not answer.)
    written.write_text(dump_config(config))
    written.chmod(0o644)
    uri = f"http://alice:{PASSWORD}@127.0.0.1:9"
    monkeypatch.setattr(following, "LAST_PAUSES_SECONDS", 0.05)
    refused = (f"--tracking.mlflow.uri={uri}", "--wait-for-tracking=3")
    shown = train("--train.max_steps=3", *refused, "--no-export.at_end")
    assert "http://127.0.0.1:9" in shown or not mlflow_installed()
    events = read_events(runs / "run" / "events.jsonl")
    (changed,) = [each["fields"] for each in events if each["event"] == SETTINGS_CHANGED]
    assert changed.keys() == {"train.max_steps", "tracking.mlflow.uri", "export.at_end"}, "no variable has changed"

    # A complete run: no attempt writes its config again.
    written.write_text(dump_config(config))
    assert "is already complete" in train("--train.max_steps=3", "--no-tracking.mlflow.enabled", "--no-export.at_end")
