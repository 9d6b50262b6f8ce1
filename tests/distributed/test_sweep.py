"""Sweeps: whatever is killed, the log and every trial's trajectory are those of an undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.record.jsonl import each_event, read_trajectory
from raytune_fsdp.tune.demo import demo as demo_sweep
from tests.running_sweeps import SweepCommand, gone, spec_of

GONE_SECONDS = 20.0


def steps(sweep: SweepCommand) -> int:
    return sum(map(len, sweep.trajectories().values()))


@pytest.mark.parametrize("trials", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sweep_to_which_everything_happens_has_the_log_of_an_undisturbed_one(tmp_path: Path, trials: int) -> None:
    space = {"optim.lr": {"grid": [1e-3, 1e-2, 3e-4, 3e-3][:trials]}}
    whole = SweepCommand(tmp_path, spec_of(tmp_path, "whole", space=space))
    assert whole.end() == 0, whole.said
    sweep = SweepCommand(tmp_path, spec_of(tmp_path, "disturbed", space=space))
    sweep.until(lambda: steps(sweep) > 0)
    for child in sweep.children():
        child.kill()
    sweep.until(lambda: b'"decision"' in sweep.log)
    assert gone(sweep.kill(), GONE_SECONDS), "trials end with the command that has started them"
    sweep.start()
    sweep.until(lambda: b'"decision"' in sweep.log and len(sweep.children()) > 0)
    if trials == 4:
        assert main(["stop", str(sweep.place)]) == 0
    else:
        sweep.process.send_signal(signal.SIGINT)
    assert sweep.end() == 130 and "error: the sweep was stopped; the same command goes on" in sweep.said
    sweep.start()
    assert sweep.end() == 0, sweep.said
    assert sweep.log == whole.log and sweep.trajectories() == whole.trajectories()
    assert [len(each) for each in whole.trajectories().values()].count(16) == 1, "the best trains to its end"
    built = {run: "windows_built" in events(whole, run) for run in whole.trajectories()}
    assert built.pop("rates-000") and not any(built.values()), "windows are built once"
    _the_best_one_is_a_run_like_any_other(whole)


def _the_best_one_is_a_run_like_any_other(sweep: SweepCommand) -> None:
    best = load_config(sweep.place / "best.yaml")
    assert f"raytune-fsdp train --config {sweep.place / 'best.yaml'} --run.name rates-best" in sweep.said
    assert best.run.stop_after is None
    finetune(best.model_copy(update={"run": best.run.model_copy(update={"name": "rates-best"})}))
    alone = read_trajectory(sweep.place.parent / "rates-best" / "metrics.jsonl")
    assert alone == sweep.trajectories()[best.run.name]


def events(sweep: SweepCommand, run: str) -> set[str]:
    return {event["event"] for event in each_event(sweep.place.parent / run / "events.jsonl")}


@pytest.mark.slow
def test_a_trial_that_fails_for_good_is_on_the_log_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """A rate with which the loss is no number any more."""
    spec = spec_of(tmp_path, "runs", space={"optim.lr": {"grid": [1e-3, 1e30]}})
    spec["base"]["optim"] |= {"max_skipped": 1, "warmup_ratio": 0.0, "max_grad_norm": None}
    sweep = SweepCommand(tmp_path, spec)
    assert sweep.end() == 0, sweep.said
    assert "rates-001 has failed and is tried again" in sweep.said and "rates-001 has failed for good" in sweep.said
    assert b'"ended", "trial": 1' in sweep.log and str(tmp_path).encode() not in sweep.log
    again = SweepCommand(tmp_path, spec)
    assert again.end() == 0 and "trains to" not in again.said, "nothing is left to do"


@pytest.mark.slow
def test_the_demo_finds_a_rate(tmp_path: Path) -> None:
    """In about a minute, on two cores with nothing else to do."""
    demo = SweepCommand(tmp_path, {**demo_sweep(), "storage": str(tmp_path / "runs")})
    assert demo.end() == 0, demo.said
    assert "best       " in demo.said and (demo.place / "best.yaml").exists()
    assert [len(each) for each in demo.trajectories().values()] == [20, 20, 80, 40]
