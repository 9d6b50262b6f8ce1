"""The parts of a running sweep: processes tied to its command, records, times, what it will cost, what is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from raytune_fsdp.tune.board import SweepBoard
from raytune_fsdp.tune.cost import cost_of, in_words
from raytune_fsdp.tune.running import tied
from raytune_fsdp.tune.running.times import add_time, hours_used, read_times
from raytune_fsdp.tune.running.values import measured_in
from raytune_fsdp.tune.schedulers.choose import scheduler_of
from raytune_fsdp.tune.space import check_trials, trials_of
from raytune_fsdp.tune.spec import SweepSpec, load_sweep
from raytune_fsdp.tune.sweep import checked
from tests.recorded import Recorded
from tests.running_sweeps import spec_of


def test_what_is_tied_to_a_process_ends_with_it() -> None:
    asleep = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    starts = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', {tied.__file__!r}, str(os.getpid()), *{asleep!r}])\n"
        "import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"here\n"
        children = psutil.Process(parent.pid).children()
        parent.kill()
    assert len(children) == 1 and not psutil.wait_procs(children, timeout=10)[1]


def test_what_begins_after_its_parent_has_gone_ends_at_once() -> None:
    orphan = [sys.executable, "-I", "-S", tied.__file__, str(os.getpid() + 1), "/bin/echo", "nobody hears it"]
    found = subprocess.run(orphan, capture_output=True)
    assert (found.returncode, found.stdout) == (tied.INTERRUPTED, b"")


def test_a_record_says_what_is_measured_and_whether_the_run_is_over(tmp_path: Path) -> None:
    assert measured_in(Recorded(tmp_path / "none").place, None).has(None) is False
    run = Recorded(tmp_path / "run")
    run.attempt()
    run.train(3)
    found = measured_in(run.place, None)
    assert found.began and not found.over and not found.has(3)
    run.end("finished")
    assert measured_in(run.place, None).over and measured_in(run.place, None).has(7)


def test_times_are_added_up_and_what_is_no_time_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    assert hours_used(file) == 0.0
    add_time(file, "started", trial=0)
    add_time(file, "ended", trial=0, seconds=1800, ranks=4)
    with file.open("a") as out:
        out.write('{"what": "ended", "seconds": "many", "ranks": 1}\n[1]\n{"what": "ended", "sec')
    assert hours_used(file) == 2.0 and len(list(read_times(file))) == 3


def sweep_of(directory: Path, **changes: Any) -> SweepSpec:
    return load_sweep(spec_of(directory, "runs", **changes))


def test_what_a_sweep_takes_is_said_before_it_starts(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path)
    configs, scheduler = checked(spec)
    cost = cost_of(spec, scheduler, configs)
    assert (cost.trials, cost.steps, cost.full) == (4, 4 * 4 + 2 * 4 + 8, 64)
    assert cost.tokens == cost.steps * 10 * 48
    assert in_words(spec, cost)[0].startswith("4 trials, 32 steps, 50 % of what all would take")
    every = sweep_of(tmp_path, scheduler={"type": "none"})
    trials = check_trials(every, trials_of(every))
    assert cost_of(every, scheduler_of(every, trials), trials).steps == 64


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(spec_of(tmp_path, "runs")))
    assert main(["sweep", str(file), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("4 trials, 32 steps")
    assert not (tmp_path / "runs").exists()


def test_a_table_folds(tmp_path: Path) -> None:
    from raytune_fsdp.tune.log import Trial
    from raytune_fsdp.tune.table import Standing

    rows = [
        Standing(Trial(n, rate, n), rate, 4, 1.0 + n, "stopped" if n else "open", None)
        for n, rate in enumerate({"optim.lr": 10.0**-n} for n in range(12))
    ]
    lines = SweepBoard(sweep_of(tmp_path)).table(rows)
    assert lines[0].split() == ["trial", "value", "step", "state", "changes"]
    assert lines[1].split() == ["rates-000", "1.0000", "4", "open", "optim.lr=1"]
    assert lines[-1] == "and 4 more: 4 stopped" and len(lines) == 10


def test_a_run_that_stops_does_not_wait_for_tasks() -> None:
    with pytest.raises(ConfigError, match=r"^run.stop_after=40 with eval.where=task: .* or leave stop_after out"):
        load_config("demo", ["--run.stop_after=40", "--eval.where=task"])


def test_evaluations_by_tasks_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "runs")
    spec["base"]["eval"] |= {"where": "task"}
    spec["base"]["cluster"] |= {"launch": "ray"}
    with pytest.raises(ConfigError, match=r"^eval.where=task in the base of rates-000: .* set eval.where=ranks"):
        checked(load_sweep(spec))
