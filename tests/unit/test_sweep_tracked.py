"""A sweep's run in MLflow, and its trials below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.launch.environment import environment
from raytune_fsdp.launch.quiet import quieting
from raytune_fsdp.record.copies.mlflow import MlflowTracker
from raytune_fsdp.record.copies.mlflow_run import connect, get_run
from raytune_fsdp.record.tracker import RunStart
from raytune_fsdp.tune.spec import load_sweep
from raytune_fsdp.tune.sweep import checked
from raytune_fsdp.tune.tracked import Tracked
from raytune_fsdp.tune.turn import turn
from tests.running_sweeps import spec_of


@pytest.mark.thorough
def test_trials_are_below_the_sweep_which_keeps_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    given = spec_of(tmp_path, "runs")
    given["base"]["tracking"]["mlflow"] |= {"enabled": True, "uri": uri}
    spec = load_sweep(given)
    configs, scheduler = checked(spec)
    (tmp_path / "runs" / "rates").mkdir(parents=True)
    tracked, again = Tracked(spec, configs[0]), Tracked(spec, configs[0])
    tracked.begin()
    again.begin()
    assert tracked.id is not None and again.id == tracked.id
    trial = MlflowTracker(uri, experiment="raytune_fsdp", directory=tmp_path / "runs" / "rates-000", parent=tracked.id)
    trial.start(RunStart(name="rates-000", attempt=1, total_steps=16))
    trial.finish("interrupted")
    tracked.end(turn(spec, scheduler, (), ()).entries, "rates-000", 1.5, over=True)
    with environment(quieting()):
        client = connect(uri)
        run, below = get_run(client, tracked.id), get_run(client, trial.state()["mlflow_run_id"])
    assert (run.status, run.tags["raytune_fsdp.best"], list(run.keys)) == ("FINISHED", "rates-000", ["sweep/best"])
    assert below.tags["mlflow.parentRunId"] == tracked.id
