"""A sweep's run in MLflow, and its trials below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.launch.environment import environment
from raytune_fsdp.launch.quiet import quieting
from raytune_fsdp.record.copies.mlflow import MlflowTracker
from raytune_fsdp.record.copies.mlflow_run import connect, get_run
from raytune_fsdp.record.tracker import RunStart
from raytune_fsdp.tune.log import Value
from raytune_fsdp.tune.space import trials_of
from raytune_fsdp.tune.spec import load_sweep
from raytune_fsdp.tune.sweep import checked
from raytune_fsdp.tune.table import best_of, leaderboard
from raytune_fsdp.tune.tracked import Tracked
from raytune_fsdp.tune.turn import begun_of
from tests.running_sweeps import spec_of


def test_trials_are_below_the_sweep_which_keeps_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    given = spec_of(tmp_path, "runs", seeds=2)
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
    # Two seeds: the mean is what is compared, and the better one is found later.
    log = [begun_of(spec, configs[0]), *trials_of(spec), Value(0, 4, 2.0), Value(1, 4, 3.0)]
    tracked.end(log, best_of(leaderboard(log)), over=False)
    log += [Value(2, 4, 0.5), Value(3, 4, 2.5)]
    tracked.end(log, best_of(leaderboard(log)), over=True)
    with environment(quieting()):
        client = connect(uri)
        run, below = get_run(client, tracked.id), get_run(client, trial.state()["mlflow_run_id"])
    assert (run.status, run.tags["raytune_fsdp.best"], list(run.keys)) == ("FINISHED", "rates-001-s0", ["sweep/best"])
    assert client.get_run(tracked.id).data.metrics == {"sweep/best": 1.5}
    assert "`sweep/best` is the mean over 2 seeds" in run.tags["mlflow.note.content"]
    assert below.tags["mlflow.parentRunId"] == tracked.id
