"""What MLflow's own pages show of a run, in a browser that has never seen them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.record.copies.mlflow import MlflowTracker, mlflow_installed
from raytune_fsdp.record.copies.mlflow_run import ENVIRONMENT
from raytune_fsdp.record.jsonl import JsonlTracker
from raytune_fsdp.record.tracker import Composite, RunStart
from tests.browser import CHROMIUM, Browser
from tests.mlflow_server import Server
from tests.unit.fake_mlflow import step

pytestmark = [
    pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed"),
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def test_the_address_of_a_run_opens_its_curves_with_the_training_loss_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "server")
    try:
        mlflow = MlflowTracker(server.uri, experiment="demo", directory=tmp_path / "run", finish_seconds=120)
        tracker = Composite([mlflow], record=JsonlTracker(tmp_path / "run"))
        tracker.start(RunStart(name="first", attempt=1, total_steps=20))
        tracker.steps([step(number, 1 / number) for number in range(1, 21)], world_size=2, attempt=1)
        tracker.evaluation(20, {"eval/heldout/loss": 1.5})
        tracker.event("saved", step=20)
        tracker.finish("finished")
        assert mlflow.unsent is None and mlflow.page is not None
        with Browser(tmp_path / "profile") as browser:
            browser.open(f"{server.uri}/{mlflow.page}")
            shown = "document.body.innerText"
            browser.wait(f"{shown}.includes('first (train/loss)')", seconds=240)
            assert "workflowType=machine_learning" in browser.value("location.href")
            text = browser.value(shown)
            sections = [text.index(f"\n{name}\n") for name in ("train/loss", "train/lr", "perf", "eval/heldout")]
            assert sections[0] == min(sections), "before what the alphabet has before it"
    finally:
        server.kill()
