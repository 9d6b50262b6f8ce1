"""Sweeps: whatever is killed, the log and every trial's trajectory are those of an undisturbed one."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from raytune_fsdp.base.errors import Interrupted
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.record.jsonl import each_event, read_trajectory
from raytune_fsdp.tune.demo import demo as demo_sweep
from raytune_fsdp.tune.log import Decision, read_log
from raytune_fsdp.tune.running import runner
from raytune_fsdp.tune.spec import load_sweep
from raytune_fsdp.tune.sweep import checked
from tests.running_sweeps import SweepCommand, gone, spec_of
from tests.sweeps import check_follows

GONE_SECONDS = 20.0


def steps(sweep: SweepCommand) -> int:
    return sum(map(len, sweep.trajectories().values()))


class SweepHere(SweepCommand):
    """A sweep that nobody disturbs, in this process: it has ended once it was started."""

    def start(self) -> None:
        self._code = sweep_here(self)

    def end(self, seconds: float = 0.0) -> int:
        return self._code


def sweep_here(sweep: SweepCommand) -> int:
    """Give its command, with trials that train in this process."""
    torch.set_num_threads(1)  # as the processes of trials have
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Child", TrainedHere)
        return main(["sweep", *sweep._arguments])


class TrainedHere:
    """In place of the process of a trial."""

    pid = os.getpid()

    def __init__(self, config: FinetuneConfig, *_: object) -> None:
        self._code = 0
        try:
            finetune(config)
        except Interrupted:
            self._code = 130

    def code(self) -> int:
        return self._code


@pytest.mark.parametrize("trials", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sweep_to_which_everything_happens_has_the_log_of_an_undisturbed_one(tmp_path: Path, trials: int) -> None:
    space = {"optim.lr": {"grid": [1e-3, 1e-2, 3e-4, 3e-3][:trials]}}
    undisturbed = SweepHere if trials == 2 else SweepCommand
    whole = undisturbed(tmp_path, spec_of(tmp_path, "whole", space=space))
    assert whole.end() == 0, whole.said
    sweep = SweepCommand(tmp_path, spec_of(tmp_path, "disturbed", space=space))
    if trials == 4:
        sweep.until(lambda: steps(sweep) > 0)
        for child in sweep.children():
            child.kill()
    sweep.until(lambda: b'"decision"' in sweep.log)
    assert gone(sweep.kill(), GONE_SECONDS), "trials end with the command that has started them"
    if trials == 4:
        _other_data_stops_it(sweep, tmp_path / "tokens.jsonl")
        for stop in (lambda: main(["stop", str(sweep.place)]), lambda: sweep.process.send_signal(signal.SIGINT)):
            sweep.start()
            sweep.until(lambda: len(sweep.children()) > 0)
            assert not stop()
            assert sweep.end() == 130 and "error: the sweep was stopped; the same command goes on" in sweep.said
        sweep.start()
        assert sweep.end() == 0, sweep.said
    else:
        assert sweep_here(sweep) == 0
    assert sweep.log == whole.log and sweep.trajectories() == whole.trajectories()
    assert [len(each) for each in whole.trajectories().values()].count(16) == 1, "the best trains to its end"
    together = sweep if trials == 2 else whole
    built = {run: "windows_built" in events(together, run) for run in whole.trajectories()}
    assert built.pop("rates-000") and not any(built.values()), "windows are built once"
    if trials == 4:
        _the_best_one_is_a_run_like_any_other(whole)


def _other_data_stops_it(sweep: SweepCommand, data: Path) -> None:
    """No trial fails for it: its runs are refused, and with the data as it was they go on."""
    before, log = data.read_bytes(), sweep.log
    data.write_bytes(before + before.splitlines(keepends=True)[0])
    sweep.start()
    assert sweep.end() == 2, sweep.said
    assert "is refused, so the sweep stops: " in sweep.said and "files" in sweep.said
    assert b'"error": "' not in sweep.log and sweep.log.startswith(log)
    data.write_bytes(before)


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
def test_a_trial_that_is_killed_again_and_again_stops_the_sweep_which_goes_on_or_leaves_it_out(tmp_path: Path) -> None:
    """Nothing of that is on the log: a machine that kills processes is no fault of a rate of learning."""
    spec = spec_of(tmp_path, "runs", space={"optim.lr": {"grid": [1e-3, 1e-2]}}, concurrent=1)
    sweep = SweepCommand(tmp_path, spec)
    while sweep.process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for child in sweep.children():
                child.kill()
        time.sleep(0.2)
    assert sweep.end() == 1, sweep.said
    stops = re.search(
        r"error: (rates-00[01]) has failed 3 times, so the sweep stops: it was killed by SIGKILL; mend", sweep.said
    )
    assert stops is not None, sweep.said
    assert b'"ended"' not in sweep.log and b'"value"' not in sweep.log
    left_out = SweepCommand(tmp_path, {**spec, "skip": [stops[1]]})
    assert left_out.end() == 0, left_out.said
    assert b"it was left out (skip)" in left_out.log and load_config(sweep.place / "best.yaml").run.name != stops[1]


@pytest.mark.slow
def test_the_log_of_an_asynchronous_sweep_gives_its_own_decisions(tmp_path: Path) -> None:
    """Who arrives first is on it, before a kill and after."""
    spec = spec_of(tmp_path, "runs", scheduler={"type": "asha", "first": 4, "eta": 2})
    sweep = SweepCommand(tmp_path, spec)
    sweep.until(lambda: b'"decision"' in sweep.log)
    assert gone(sweep.kill(), GONE_SECONDS)
    before = sweep.log
    sweep.start()
    assert sweep.end() == 0, sweep.said
    assert sweep.log.startswith(before)
    log = read_log(sweep.place / "log.jsonl")
    assert sum(isinstance(entry, Decision) for entry in log) >= 2
    check_follows(checked(load_sweep(spec))[1], log, 4)


@pytest.mark.slow
def test_optuna_proposes_the_same_trials_whatever_is_killed(tmp_path: Path) -> None:
    more = {
        "space": {"optim.lr": {"loguniform": [1e-4, 1e-1]}}, "search": {"type": "optuna", "trials": 4},
        "scheduler": {"type": "none"},
    }  # fmt: skip
    whole = SweepCommand(tmp_path, spec_of(tmp_path, "whole", **more))
    assert whole.end() == 0, whole.said
    sweep = SweepCommand(tmp_path, spec_of(tmp_path, "killed", **more))
    sweep.until(lambda: b'"ended"' in sweep.log)
    assert gone(sweep.kill(), GONE_SECONDS)
    sweep.start()
    assert sweep.end() == 0, sweep.said
    assert sweep.log == whole.log and sweep.trajectories() == whole.trajectories()
    assert [len(each) for each in whole.trajectories().values()] == [16] * 4


@pytest.mark.slow
def test_the_demo_finds_a_rate(tmp_path: Path) -> None:
    """In about a minute, on two cores with nothing else to do."""
    demo = SweepCommand(tmp_path, {**demo_sweep(), "storage": str(tmp_path / "runs")})
    assert demo.end() == 0, demo.said
    assert "best       " in demo.said and (demo.place / "best.yaml").exists()
    assert [len(each) for each in demo.trajectories().values()] == [20, 20, 80, 40]
