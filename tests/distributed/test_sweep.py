"""Sweeps: whatever is killed, the log and every trial's trajectory are those of an undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from raytune_fsdp.config.load import load_config
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.record.jsonl import each_event, read_trajectory
from tests.running_sweeps import SweepCommand, gone, spec_of

GONE_SECONDS = 20.0


def steps(sweep: SweepCommand) -> int:
    return sum(map(len, sweep.trajectories().values()))


@pytest.mark.parametrize("trials", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sweep_whose_command_is_killed_goes_on_to_the_same_log(tmp_path: Path, trials: int) -> None:
    space = {"optim.lr": {"grid": [1e-3, 1e-2, 3e-4, 3e-3][:trials]}}
    whole = SweepCommand(tmp_path, spec_of(tmp_path, "whole", space=space))
    assert whole.end() == 0, whole.said
    killed = SweepCommand(tmp_path, spec_of(tmp_path, "killed", space=space))
    for moment in (lambda: steps(killed) > 4, lambda: b'"decision"' in killed.log):
        killed.until(moment)
        assert gone(killed.kill(), GONE_SECONDS), "trials end with the command that has started them"
        killed.start()
    assert killed.end() == 0, killed.said
    assert killed.log == whole.log
    assert killed.trajectories() == whole.trajectories()
    assert [len(each) for each in whole.trajectories().values()].count(16) == 1, "the winner trains to its end"
    again = SweepCommand(tmp_path, spec_of(tmp_path, "killed", space=space))
    assert again.end() == 0 and again.log == whole.log, "nothing is left to do"
    _the_best_one_goes_on(whole)


def _the_best_one_goes_on(sweep: SweepCommand) -> None:
    """What best.yaml says can be done: and it is the run that it would have been outside of the sweep."""
    best = load_config(sweep.place / "best.yaml")
    assert f"raytune-fsdp train --config {sweep.place / 'best.yaml'} --run.name rates-best" in sweep.said
    assert best.run.stop_after is None
    finetune(best.model_copy(update={"run": best.run.model_copy(update={"name": "rates-best"})}))
    alone = read_trajectory(sweep.place.parent / "rates-best" / "metrics.jsonl")
    assert alone == sweep.trajectories()[best.run.name]


def test_a_stopped_sweep_commits_and_a_trial_that_is_killed_is_tried_again(tmp_path: Path) -> None:
    space = {"optim.lr": {"grid": [1e-3, 1e-2]}}
    sweep = SweepCommand(tmp_path, spec_of(tmp_path, "runs", space=space))
    sweep.until(lambda: steps(sweep) > 0)
    for child in sweep.children():
        child.kill()
    sweep.until(lambda: b'"decision"' in sweep.log)
    sweep.process.send_signal(signal.SIGINT)
    assert sweep.end() == 130
    assert "error: the sweep was stopped; the same command goes on" in sweep.said
    assert "was killed by SIGKILL" in sweep.said and "is tried again" in sweep.said
    sweep.start()
    assert sweep.end() == 0, sweep.said
    whole = SweepCommand(tmp_path, spec_of(tmp_path, "whole", space=space))
    assert whole.end() == 0 and whole.log == sweep.log and whole.trajectories() == sweep.trajectories()
    built = {
        run.name: [event for event in each_event(run / "events.jsonl") if event["event"] == "windows_built"]
        for run in whole.place.parent.glob("rates-*")
    }
    assert built["rates-000"] and not built["rates-001"], "windows are built once"


def test_a_trial_that_fails_for_good_is_on_the_log_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """A rate with which the loss is no number any more."""
    space = {"optim.lr": {"grid": [1e-3, 1e30]}}
    spec = spec_of(tmp_path, "runs", space=space)
    spec["base"]["optim"] |= {"max_skipped": 0, "warmup_ratio": 0.0, "max_grad_norm": None}
    sweep = SweepCommand(tmp_path, spec)
    assert sweep.end() == 0, sweep.said
    assert b'"ended"' in sweep.log and str(tmp_path).encode() not in sweep.log
    assert "rates-001 has failed for good" in sweep.said
