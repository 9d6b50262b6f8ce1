"""The parts of a running sweep: processes tied to its command, records, times, what it will cost, what is shown."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from raytune_fsdp.base.errors import ConfigError, Interrupted, ResumeError, TrainingError, TransientError
from raytune_fsdp.cli import plan_rows
from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config, recorded_text
from raytune_fsdp.launch import run_lock
from raytune_fsdp.launch.environment import with_package
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.tune.best import put_best
from raytune_fsdp.tune.board import SweepBoard
from raytune_fsdp.tune.cost import cost_of, in_words
from raytune_fsdp.tune.log import Decision, Draw, Entry, SweepLog, Trial, TrialEnded, Value, read_log
from raytune_fsdp.tune.place import SweepDir, as_run
from raytune_fsdp.tune.running import children, runner, tied
from raytune_fsdp.tune.running.cluster import ray_for, threads_for
from raytune_fsdp.tune.running.times import TrialTimes, ranks_of, read_times
from raytune_fsdp.tune.running.values import check_begins, check_own, measured_in
from raytune_fsdp.tune.schedulers.choose import scheduler_of
from raytune_fsdp.tune.space import check_trials, is_run_name, run_name_in, trials_of
from raytune_fsdp.tune.spec import SweepSpec, load_sweep
from raytune_fsdp.tune.sweep import checked, measured_by, sweep
from raytune_fsdp.tune.table import OverSeeds, Standing, best_of, leaderboard
from raytune_fsdp.tune.turn import begun_of
from tests.recorded import Recorded
from tests.running_sweeps import TrialProcess, Trials, spec_of


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


def test_a_trial_that_was_asked_to_stop_is_not_asked_again_when_the_sweep_is_gone(tmp_path: Path) -> None:
    """Ray ends a job three seconds after it has asked it to stop; the trial then still commits."""
    trial = tmp_path / "trial.py"
    trial.write_text(
        "import os, sys, time\n"
        "from raytune_fsdp.launch.signals import Signals\n"
        "with Signals() as signals:\n"
        "    signals.hold()\n"
        "    parent = os.getppid()\n"
        "    open('here', 'w').close()\n"
        "    while signals.count == 0 or os.getppid() == parent: time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"
        "    open(f'asked-{signals.count}', 'w').close()\n"
    )
    tied_trial = [sys.executable, "-I", "-S", tied.__file__]
    starts = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([*{tied_trial!r}, str(os.getpid()), sys.executable, {str(trial)!r}])\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", starts], cwd=tmp_path, env=with_package(os.environ)) as parent:
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        (child,) = psutil.Process(parent.pid).children()
        child.terminate()
        time.sleep(1.1)  # sooner it would be the same signal, sent twice
        parent.kill()
    assert not psutil.wait_procs([child], timeout=10)[1] and (tmp_path / "asked-1").exists()


def test_what_begins_after_its_parent_has_gone_ends_at_once() -> None:
    orphan = [sys.executable, "-I", "-S", tied.__file__, str(os.getpid() + 1), "/bin/echo", "nobody hears it"]
    found = subprocess.run(orphan, capture_output=True)
    assert (found.returncode, found.stdout) == (tied.INTERRUPTED, b"")


def test_a_record_says_what_is_measured_and_whether_the_run_is_over(tmp_path: Path) -> None:
    config = checked(sweep_of(tmp_path))[0][0]
    assert measured_in(config, Recorded(tmp_path / "none").place, None).has(None) is False
    run = Recorded(tmp_path / "run")
    run.attempt()
    run.train(3)
    found = measured_in(config, run.place, None)
    assert found.began and not found.over and not found.has(3)
    run.end("finished")
    assert measured_in(config, run.place, None).over and measured_in(config, run.place, None).has(7)


def test_times_are_added_up_and_what_is_no_time_is_left_out(tmp_path: Path) -> None:
    place = SweepDir(tmp_path / "rates")
    place.path.mkdir()
    times = TrialTimes(place)
    times.started(0, "rates-000", 4)
    times.ended(0, "rates-000", 0, 1800)
    assert times.hours == 0.5
    with place.times.open("a") as out:
        out.write(f'{{"what": "ended", "seconds": {10**400}, "ranks": 1}}\n')
        out.write('{"what": "ended", "seconds": "many", "ranks": 1}\n[1]\n{"what": "ended", "sec')
    assert TrialTimes(place).hours == 0.5 and len(list(read_times(place.times))) == 4


def test_what_was_killed_with_its_command_took_the_time_until_its_last_step(tmp_path: Path) -> None:
    place = SweepDir(tmp_path / "rates")
    place.path.mkdir()
    TrialTimes(place).started(1, "rates-001", 4)
    run = Recorded(tmp_path, "rates-001")
    run.attempt()
    run.train(3)
    hour_later = time.time() + 3600
    os.utime(run.place.metrics, (hour_later, hour_later))
    found = TrialTimes(place).hours
    assert found == pytest.approx(ranks_of(run.place.path), rel=0.01)
    assert TrialTimes(place).hours == pytest.approx(found, rel=1e-4), "counted once"
    times = TrialTimes(place)
    times.started(1, "rates-001", 8)
    later = datetime.fromtimestamp(hour_later - 360, UTC).isoformat()
    times.trains("rates-001")
    place.times.write_text("".join(  # it had waited for its ranks until six minutes before
        line if "trains" not in line else json.dumps({**json.loads(line), "time": later}) + "\n"
        for line in place.times.read_text().splitlines(keepends=True)
    ))  # fmt: skip
    assert TrialTimes(place).hours - found == pytest.approx(0.1 * ranks_of(run.place.path), rel=0.01)


def sweep_of(directory: Path, **changes: Any) -> SweepSpec:
    return load_sweep(spec_of(directory, "runs", **changes))


def test_trials_that_share_a_machine_share_its_cores_by_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    given = spec_of(tmp_path, "runs")
    given["base"]["cluster"] |= {"workers": 2}
    config = checked(load_sweep(given))[0][0]
    assert [threads_for(config, trials) for trials in (1, 2, 4, 100)] == [None, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_for(config, 2) is None, "the user has said it"


def test_the_ray_of_all_trials_has_room_for_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def held(command: Sequence[str], **_: object) -> None:
        asked.update(json.loads(command[-1]))
        raise OSError("enough was seen")

    monkeypatch.setattr(subprocess, "Popen", held)
    configs = checked(
        sweep_of(tmp_path, space={"cluster.workers": {"grid": [1, 3]}, "cluster.launch": {"grid": ["ray"]}})
    )[0]
    with pytest.raises(OSError, match="enough was seen"), ray_for(configs, 2, None, tmp_path):
        pass
    assert asked["workers"] == 6


def test_a_run_of_other_settings_is_no_trial(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path)
    first, second = checked(spec)[0][:2]
    place = RunDir.of(first)
    check_own(first, place)
    place.path.mkdir(parents=True)
    place.config.write_text(recorded_text(first))
    check_own(first, place)
    with pytest.raises(ResumeError, match=r"rates-000 has a run of other settings .*optim.lr=0.01 \(there 0.001\)"):
        check_own(second, place)
    place.config.unlink()
    (place.path / "sweep.yaml").touch()
    with pytest.raises(ResumeError, match=r"rates-000 is a sweep, and a trial of this one has the same name: move it"):
        check_own(first, place)
    (place.path / "sweep.yaml").unlink()
    place.config.write_text("train: [")
    with pytest.raises(ResumeError, match=r"config.yaml cannot be read, so nothing says whose run it is"):
        check_own(first, place)


def test_a_sweep_with_a_secret_goes_on(tmp_path: Path) -> None:
    """The configs of its runs do not hold it."""
    given, token = spec_of(tmp_path, "runs"), "hf_abcdefghijklmnopqrstuvwxyz0123456789"
    given["base"]["cluster"]["env"] = {"HF_TOKEN": token, "OTHER": "1"}
    given["base"]["eval"]["prompts"] = [f"the key is {token}"]
    given["base"]["data"]["eval"][0]["name"] = f"others-{token}"
    first, second = checked(load_sweep(given))[0][:2]
    place = RunDir.of(first)
    place.path.mkdir(parents=True)
    place.config.write_text(recorded_text(first))
    assert "<redacted>" in place.config.read_text() and token not in place.config.read_text()
    check_own(first, place)
    with pytest.raises(ResumeError, match=r"other settings than this trial of the sweep has: optim.lr=0.01 \(there"):
        check_own(second, place)
    # Secrets may change where they decide nothing.
    del given["base"]["cluster"]["env"]
    given["base"]["eval"]["prompts"] = ["there is no key"]
    check_own(checked(load_sweep(given))[0][0], place)
    given["base"]["data"]["eval"][0]["name"] = "others"
    with pytest.raises(ResumeError, match="other settings than this trial of the sweep has: data.eval=.*redacted"):
        check_own(checked(load_sweep(given))[0][0], place)


def test_a_sweep_does_not_begin_with_what_nobody_knows_to_be_its_own(tmp_path: Path) -> None:
    """The log was removed and not the runs: what they were measured on may have changed since."""
    spec, storage = sweep_of(tmp_path), tmp_path / "runs"
    for name in ("rates-best", "rates-000-more", "rates-0001", "rates-001-s1"):
        run = Recorded(storage, name)
        run.attempt()
        run.train(4)
        if name != "rates-001-s1":
            run.evaluate(others=1.0)
    check_begins(spec)
    Recorded(storage, "rates-003-g2").attempt()
    check_begins(spec)
    assert all(is_run_name(run_name_in("rates", *given), "rates") for given in ((3,), (1003, 1, 2)))
    run.evaluate(others=1.0)
    with pytest.raises(
        ResumeError, match=r"rates-001-s1 has been measured already, and the sweep has no log .*/rates/"
    ):
        sweep(spec)


def test_what_cannot_be_compared_or_begun_is_refused_at_once(tmp_path: Path) -> None:
    given = spec_of(tmp_path, "runs")
    given["base"]["data"]["eval"] = []
    with pytest.raises(ConfigError, match=r"data.eval=\[\] in the base of rates-000: trials are compared by"):
        checked(load_sweep(given))
    with pytest.raises(Interrupted, match="budget.until=2020-01-01 08:00 has come"):
        sweep(sweep_of(tmp_path, budget={"until": "2020-01-01 08:00"}))
    Recorded(tmp_path / "runs", "rates")
    with pytest.raises(ConfigError, match=r"name=rates: .*rates is a run: give the sweep another name"):
        sweep(sweep_of(tmp_path))


def test_a_second_command_is_refused_in_the_words_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.3)
    spec = sweep_of(tmp_path)
    with (
        run_lock.locked(as_run(spec, checked(spec)[0][0])),
        pytest.raises(ConfigError, match=r"^name=rates: another command works on .*, or choose another name$"),
    ):
        sweep(spec)


def test_what_a_sweep_takes_is_said_before_it_starts(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path)
    configs, scheduler = checked(spec)
    cost = cost_of(spec, scheduler, configs)
    assert (cost.trials, cost.steps, cost.full_steps) == (4, 4 * 4 + 2 * 4 + 8, 64)
    assert cost.tokens == cost.steps * 10 * 48
    assert in_words(spec, cost)[0].startswith("4 trials, 32 steps, 50 % of what all would take")
    every = sweep_of(tmp_path, scheduler={"type": "none"})
    trials = check_trials(every, trials_of(every))
    assert cost_of(every, scheduler_of(every, trials), trials).steps == 64


def test_going_on_the_words_are_of_the_whole_sweep(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path)
    configs, scheduler = checked(spec)
    cost = replace(cost_of(spec, scheduler, configs), gpu_hours=2.5)
    assert in_words(spec, cost, 2.0)[1] == "2.50 GPU-hours predicted, 5.00"
    first, second = in_words(spec, cost, 2.0, begun=True)
    assert first.startswith("4 trials, 32 steps in all, 50 % of") and second == "2.50 GPU-hours predicted in all, 5.00"


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(spec_of(tmp_path, "runs")))
    assert main(["sweep", str(file), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("4 trials, 32 steps, 50 %")
    assert not (tmp_path / "runs").exists()
    spec = sweep_of(tmp_path)
    SweepDir.of(spec).path.mkdir(parents=True)
    SweepLog(SweepDir.of(spec).log).append([begun_of(spec, checked(spec)[0][0])])
    assert main(["sweep", str(file), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("4 trials, 32 steps in all")


def test_a_sweep_begins_where_its_length_is_not_known_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials prepare the data, however long that takes."""
    monkeypatch.setattr(plan_rows, "SECONDS", 0.0)
    monkeypatch.setattr(plan_rows, "_STARTING", 0.0)
    monkeypatch.setattr(plan_rows, "_ENDS_SECONDS", 0.0)
    begins = list[SweepSpec]()

    def begin(spec: SweepSpec, *, before: Callable[..., None], **_: object) -> None:
        before(*checked(spec))
        begins.append(spec)

    monkeypatch.setattr("raytune_fsdp.tune.sweep.sweep", begin)
    monkeypatch.setattr("raytune_fsdp.cli.sweep._say_result", lambda *_: None)
    given = spec_of(tmp_path, "runs")
    given["base"]["train"] |= {"max_steps": None, "epochs": 2}
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(given))
    assert main(["sweep", str(file)]) == 0 and len(begins) == 1
    said = capsys.readouterr().out
    assert said.startswith("what the sweep takes is not known yet: the length of train.epochs depends on the data")
    assert main(["sweep", str(file), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "too short to count it" in error and "set train.max_steps" in error and "--samples" not in error


def test_places_are_trusted_by_every_trial_or_by_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep may begin with somebody else's checkpoint, and what refuses a trial names this flag."""
    says = tmp_path / "says.py"
    says.write_text("import sys\nprint('error:', *sys.argv[2:])\nsys.exit(2)\n")
    monkeypatch.setattr(children, "_TIED", says)
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(spec_of(tmp_path, "runs", concurrent=1)))
    for flags in ([], ["--trust-places"], ["--force"]):
        assert main(["sweep", str(file), *flags]) == 2
        command = " ".join(["raytune_fsdp.cli.main train", *flags, "--config"])
        assert command in " ".join(capsys.readouterr().err.split())


def test_a_table_folds(tmp_path: Path) -> None:
    rows = [
        Standing(Trial(n, rate, n), rate, 4, 1.0 + n, "stopped" if n else "open", None)
        for n, rate in enumerate({"optim.lr": 10.0**-n} for n in range(12))
    ]
    lines = SweepBoard(sweep_of(tmp_path)).table(rows)
    assert lines[0].split() == ["trial", "value", "step", "state", "changes"]
    assert lines[1].split() == ["rates-000", "1.0000", "4", "open", "optim.lr=1"]
    assert lines[-1] == "and 4 more: 4 stopped" and len(lines) == 10

    several = SweepBoard(sweep_of(tmp_path, seeds=3)).table([replace(row, seeds=3) for row in rows], 2)
    assert "  mean of 3 seeds  step  " in several[0]
    assert several[2].split() == ["rates-001", "2.0000", "4", "stopped", "optim.lr=0.1"]


def test_decisions_name_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = sweep_of(tmp_path, seeds=3)
    board, configs = SweepBoard(spec), checked(spec)[0]
    log = [begun_of(spec, configs[0]), *trials_of(spec)]
    log += [Value(number, 4, value) for number, value in enumerate([9, 1, 2, 3, 4, 4, 8, 8, 8, 7, 7, 7])]
    log.append(Decision(4, (3, 4, 5), (0, 1, 2, 6, 7, 8, 9, 10, 11)))
    board.decided(log, log[-1:], table=True)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "after step 4 these trials go on: rates-001-s0, rates-001-s1, rates-001-s2; these do not: rates-000-s0, "
        "rates-000-s1, rates-000-s2, rates-002-s0, rates-002-s1, rates-002-s2, rates-003-s0, rates-003-s1 and 1 more"
    )
    assert said[2].split() == ["rates-001", "3.6667", "4", "open", "optim.lr=0.01"]
    assert board._fields == ["best 3.6667 (mean of 3 seeds): rates-001", "optim.lr=0.01"]


def test_draws_name_the_runs_that_they_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = sweep_of(tmp_path)
    log = [begun_of(spec, checked(spec)[0][0]), *trials_of(spec), Decision(4, (1, 2), (0,))]
    log += [Draw(0, 4, 1, {"optim.lr": 7.0}), Decision(8, (0, 2), (1,)), Draw(1, 8, 0, {"optim.lr": 8.0})]
    SweepBoard(spec).decided(log, log[5:], table=True)
    assert capsys.readouterr().out.splitlines() == [
        "after step 4 these trials go on: rates-001, rates-002; these do not: rates-000",
        "after step 4 rates-000 goes on from rates-001, as rates-000-g1",
        "after step 8 these trials go on: rates-000-g1, rates-002; these do not: rates-001",
        "after step 8 rates-001 goes on from rates-000-g1, as rates-001-g1",
    ]


def test_seeds_in_lines(tmp_path: Path) -> None:
    rows = [OverSeeds(1, "eval/a/loss", 1000, 3, 2.5, 0.25, None, None, None),
            OverSeeds(2, "eval/a/loss", 4, 1, 3.0, None, 0.5, 0.125, True)]  # fmt: skip
    head, *lines = SweepBoard(sweep_of(tmp_path, seeds=3)).over_seeds(rows)
    assert head.split()[:6] == ["trial", "metric", "at", "step", "seeds", "mean"]
    assert [line.split() for line in lines] == [
        ["rates-001", "eval/a/loss", "1,000", "3", "2.5000", "0.2500", "-", "-"],
        ["rates-002", "eval/a/loss", "4", "1", "3.0000", "-", "+0.5000", "±", "0.1250", "yes"],
    ]


def test_the_best_of_seeds_is_written_with_its_mean_and_commands_for_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = spec_of(tmp_path, "runs", seeds=2)
    given["base"]["export"] |= {"at_end": True, "push": "me/model"}
    spec, here = load_sweep(given), tmp_path / "a b"
    here.mkdir()
    monkeypatch.chdir(here)
    place = SweepDir.of(spec)
    place.path.mkdir(parents=True)
    log = [begun_of(spec, checked(spec)[0][0]), *trials_of(spec)]
    assert best_of(leaderboard(log)) is None
    log += [Value(number, 4, value) for number, value in enumerate([1.0, 9.0, 2.0, 3.0])]
    best = best_of(leaderboard(log))
    assert best is not None and (best.trial.number, best.value) == (2, 2.5)
    put_best(spec, log, best)
    said = place.best.read_text().splitlines()[:4]
    assert said[0] == (
        "# The best trial of the sweep rates: rates-001, with the mean loss 2.5 after step 4, the mean over its 2 "
        "seeds."
    )
    assert said[1] == "# This is the config of its first seed, rates-001-s0."
    begin = f"cd {shlex.quote(str(here))} && raytune-fsdp train --config {tmp_path}"
    assert said[2].partition(":")[2].strip() == f"{begin}/runs/rates-001-s0/config.yaml --run.stop_after null"
    assert said[3].partition(":")[2].strip() == f"{begin}/runs/rates/best.yaml --run.name rates-best"
    written = load_config(place.best)
    assert (written.run.name, written.export.push) == ("rates-001-s0", "me/model")


def test_what_is_measured_after_the_sweep_does_not_count(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path)
    run = Recorded(tmp_path / "runs", "rates-001")
    run.attempt()
    for loss in (3.0, 2.0, 1.0):
        run.train(4)
        run.evaluate(others=loss)
    log = [begun_of(spec, checked(spec)[0][0]), *trials_of(spec), Value(1, 8, 2.0)]
    assert measured_by(spec, log)[1] == {4: {"eval/others/loss": 3.0}, 8: {"eval/others/loss": 2.0}}


def test_a_run_that_stops_does_not_wait_for_tasks() -> None:
    with pytest.raises(ConfigError, match=r"^run.stop_after=40 with eval.where=task: .* or leave stop_after out"):
        load_config("demo", ["--run.stop_after=40", "--eval.where=task"])


def test_evaluations_by_tasks_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "runs")
    spec["base"]["eval"] |= {"where": "task"}
    spec["base"]["cluster"] |= {"launch": "ray"}
    with pytest.raises(ConfigError, match=r"^eval.where=task in the base of rates-000: .* set eval.where=ranks"):
        checked(load_sweep(spec))


# What counts against a trial.


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """Two trials, of which the first is the worse one."""
    return Trials(sweep_of(tmp_path, space={"optim.lr": {"grid": [1e-3, 1e-2]}}), monkeypatch)


def errors(log: Sequence[Entry]) -> list[str]:
    return [entry.error for entry in log if isinstance(entry, TrialEnded) and entry.error is not None]


def test_what_training_says_of_itself_twice_counts_whatever_its_command_says(trials: Trials) -> None:
    """On Ray that has the number of a process and of an attempt; what it says of a GPU's memory may have others."""
    checkpoints = trials.place.path.parent / "rates-001" / "checkpoints"
    trials.does["rates-001"] = [
        lambda trial: trial.fails("rank 0 on n1, process 17, failed: no room for 3 GiB", itself="no room for 3 GiB"),
        lambda trial: trial.fails("rank 0 on n2, process 19, failed: …", itself=f"no room;\n see {checkpoints}"),
    ]
    log = trials.sweep()
    assert errors(log) == ["no room; see rates-001/checkpoints"]
    assert [entry for entry in log if isinstance(entry, Decision)] == [Decision(4, (0,), (1,))]


def test_a_run_that_gives_up_twice_for_the_same_cause_has_failed_for_good(trials: Trials) -> None:
    def gives_up(cause: str) -> Callable[[TrialProcess], int]:
        return lambda trial: trial.fails(f"process {id(trial)}: {cause}", driver=cause, code=3)

    trials.does["rates-001"] = [gives_up("nothing for 61 s"), gives_up("nothing for 63 s"), gives_up("KeyError: 'x'")]
    with pytest.raises(TrainingError, match="rates-001 has failed 3 times, so the sweep stops: process"):
        trials.sweep()
    trials.does["rates-001"] = [gives_up("KeyError: 'x'"), gives_up("KeyError: 'x'")]
    assert errors(trials.sweep()) == ["KeyError: 'x'"]


@pytest.mark.parametrize("said", ["the disk is full", "rank 1 was killed by SIGKILL; the same command continues"])
def test_what_fails_around_training_is_never_the_trials_own(trials: Trials, said: str) -> None:
    trials.does["rates-001"] = [lambda trial: trial.fails(said)] * 3
    with pytest.raises(TrainingError, match=f"rates-001 has failed 3 times, so the sweep stops: {said}"):
        trials.sweep()
    log = trials.sweep()
    assert not errors(log) and Decision(4, (1,), (0,)) in log
    # Nor is what training has said of itself once, before something else has failed.
    other = Trials(trials.spec.model_copy(update={"name": "other"}), trials.patch)
    other.does["other-001"] = [
        lambda trial: trial.fails(said, itself="it diverges"),
        lambda trial: trial.fails("it diverges"),
    ]
    assert not errors(other.sweep())


def test_a_trial_that_finds_no_room_waits_for_it(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    began, waited = time.monotonic(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + waited[0], sleep=time.sleep)
    trials.patch.setattr(runner, "time", clock)
    trials.patch.setattr(runner, "without_ray", lambda config: False)  # where all ranks have room at once

    def waits(trial: TrialProcess) -> int:
        waited[0] += 60 * trial.config.cluster.wait_minutes
        return trial.finds_no_room()

    trials.does["rates-001"] = [waits] * 5
    log = trials.sweep()
    assert TrialTimes(trials.place).hours * 3600 < time.monotonic() - began + 1, "who waits has no GPUs"
    assert not errors(log) and Decision(4, (1,), (0,)) in log
    assert capsys.readouterr().out.count("rates-001 waits for room: cluster.wait_minutes=30: the workers") == 1
    # What then fails for another reason counts, whatever was waited for before.
    other = Trials(trials.spec.model_copy(update={"name": "other"}), trials.patch)
    other.does["other-001"] = [TrialProcess.finds_no_room, *[lambda trial: trial.fails("the disk is full")] * 3]
    with pytest.raises(TrainingError, match="other-001 has failed 3 times, so the sweep stops: the disk is full"):
        other.sweep()


# Forks.


def test_the_source_of_a_fork_waits_while_the_run_before_the_fork_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on, and could remove the checkpoint that the fork begins with."""
    space = {"optim.lr": {"grid": [1e-3, 1e-2]}}
    trials = Trials(sweep_of(tmp_path, space=space, scheduler={"type": "pbt", "every": 4}), monkeypatch)
    trials.does["rates-000"] = [lambda trial: trial.goes_on_after(trial.to_its_end())]
    looks = iter(range(1000))

    def look() -> int:
        if next(looks) == 50:
            trials.started[0].ends(130)
        return 0

    trials.stops = look
    trials.sweep()
    assert [trial.run.path.name for trial in trials.started][:4] == [
        "rates-000",
        "rates-001",
        "rates-000-g1",
        "rates-001",
    ]


def test_a_trial_is_left_out_by_the_name_of_a_fork_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what the sweep says where a fork cannot be trained."""
    space = {"optim.lr": {"grid": [1e-3, 1e-2]}}
    pbt = {"type": "pbt", "every": 4}
    trials = Trials(sweep_of(tmp_path, space=space, scheduler=pbt), monkeypatch)
    trials.does["rates-000-g1"] = [lambda trial: trial.fails("no room")] * 3
    with pytest.raises(TrainingError, match=r"rates-000-g1 has failed 3 times, .*: skip=\[rates-000-g1\]"):
        trials.sweep()
    left_out = Trials(sweep_of(tmp_path, space=space, scheduler=pbt, skip=["rates-000-g1"]), monkeypatch)
    left_out.runs = trials.runs
    log = left_out.sweep()
    assert errors(log) == ["it was left out (skip)"]
    assert [entry.step for entry in log if isinstance(entry, Draw) and entry.trial == 0][:2] == [4, 8], "it has another"


def test_a_trial_that_is_left_out_at_its_rung_wins_no_place(trials: Trials) -> None:
    """It has come there, is the best, and cannot be trained any further."""
    trials.does["rates-000"] = [lambda trial: trial.fails("no room")] * 3
    with pytest.raises(TrainingError, match="rates-000 has failed 3 times"):
        trials.sweep()
    left_out = Trials(trials.spec.model_copy(update={"skip": ["rates-001"]}), trials.patch)
    left_out.runs = trials.runs
    log = left_out.sweep()
    assert errors(log) == ["it was left out (skip)"] and Decision(4, (0,), (1,)) in log


# Exports.


@pytest.mark.parametrize("code", [1, 2])
def test_an_export_that_fails_is_tried_again_and_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def with_exports(storage: str) -> Trials:
        given = spec_of(tmp_path, storage, space={"optim.lr": {"grid": [1e-3, 1e-2]}})
        given["base"]["export"]["at_end"] = True
        return Trials(load_sweep(given), monkeypatch)

    def without_an_export(trial: TrialProcess) -> int:
        trial.to_its_end()
        trial.run.place.export.rmdir()
        trial.said = "the disk is full"
        return code

    whole = with_exports("whole").sweep()
    trials = with_exports("again")
    trials.does["rates-001"] = [TrialProcess.to_its_end, without_an_export]
    if code == 2:
        with pytest.raises(ConfigError, match="rates-001 is refused, so the sweep stops: the disk is full"):
            trials.sweep()
    assert trials.sweep() == whole and (trials.place.path.parent / "rates-001" / "export").is_dir()
    assert (code == 2) or "rates-001 has failed and is tried again: the disk is full" in capsys.readouterr().out


def test_an_export_that_was_stopped_is_made_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = spec_of(tmp_path, "runs", space={"optim.lr": {"grid": [1e-3, 1e-2]}})
    given["base"]["export"]["at_end"] = True
    trials = Trials(load_sweep(given), monkeypatch)

    def exports_on(trial: TrialProcess) -> None:
        trial.to_its_end()
        trial.run.place.export.rmdir()

    trials.does["rates-001"] = [TrialProcess.to_its_end, exports_on]
    trials.stops = lambda: len(trials.started) > 2
    with pytest.raises(Interrupted):
        trials.sweep()
    trials.stops = lambda: 0
    assert TrialEnded(1, 16) in trials.sweep() and (trials.place.path.parent / "rates-001" / "export").is_dir()


# Stops.


def test_a_trial_that_commits_is_not_ended_by_a_stop_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision has stopped it, and it still saves."""
    space, median = {"optim.lr": {"grid": [1e-2, 1e-2, 1e-2, 1.0, 1e-2]}}, {"type": "median", "grace": 3}
    trials = Trials(sweep_of(tmp_path, space=space, scheduler=median), monkeypatch)

    def saves_long(trial: TrialProcess) -> None:
        trial.run.attempt()
        trial.run.train(4)
        trial.run.evaluate(others=9.0)
        trial.ends_when_stopped = False

    trials.does |= {"rates-003": [saves_long], "rates-004": [lambda trial: trial.run.attempt()]}
    looks = iter(range(1000))

    def stopped_while_it_saves() -> int:
        (saving,) = [trial for trial in trials.started if not trial.ends_when_stopped] or [None]
        if saving is None or not saving.asked:
            return 0
        if next(looks) > 20:
            saving.ends(130)
        return 1

    trials.stops = stopped_while_it_saves
    with pytest.raises(Interrupted):
        trials.sweep()
    assert [trial.stops for trial in trials.started if not trial.ends_when_stopped] == [1]


def test_a_trial_whose_checkpoints_cannot_be_listed_was_stopped_by_nobody(trials: Trials) -> None:
    """It has come to its rung, and storage does not answer for a moment."""

    def is_away(trial: TrialProcess) -> int:
        trials.away = 1
        return trial.to_its_end()

    trials.does["rates-001"] = [is_away]
    log = trials.sweep()
    assert not errors(log) and Decision(4, (1,), (0,)) in log


def test_how_a_sweep_ended_is_said_whatever_becomes_of_best_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"optim.lr": {"grid": [1e-3, 1e-2]}}
    trials = Trials(sweep_of(tmp_path, space=space, scheduler={"type": "none"}), monkeypatch)

    def refused(*_: object) -> None:
        raise ConfigError("it makes no config any more")

    trials.patch.setattr("raytune_fsdp.tune.sweep.put_best", refused)
    trials.does["rates-001"] = [lambda trial: trial.fails("the disk is full")] * 6
    with pytest.raises(TrainingError, match="rates-001 has failed 3 times, so the sweep stops: the disk is full"):
        sweep(trials.spec)
    assert "best.yaml could not be written: it makes no config any more; the same" in capsys.readouterr().out
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(trials.spec.model_dump(mode="json")))
    assert main(["sweep", str(file)]) == 1
    table, best = capsys.readouterr().out.split("trial ")[-1].split("\n\n")
    assert table.splitlines()[1].startswith("rates-000 ") and best.startswith(f"best       {trials.place.best}\n")


def test_a_full_disk_under_the_sweep_is_said_in_a_line(trials: Trials) -> None:
    def full(*_: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trials.patch.setattr("raytune_fsdp.tune.running.runner.Child", full)
    with pytest.raises(TrainingError, match=r"^rates-000 cannot be started: .*No space left on device; mend that, and"):
        trials.sweep()
    trials.patch.setattr("raytune_fsdp.tune.sweep.replace_durably", full)
    with pytest.raises(TransientError, match=r"sweep.yaml cannot be written: No space left on device: make room or"):
        sweep(trials.spec)


def test_a_metric_that_nothing_has_may_be_set_right(trials: Trials) -> None:
    """It shows with the first evaluation, when the log has begun already; from then on it decides."""
    mistyped = Trials(trials.spec.model_copy(update={"metric": "eval/others/los"}), trials.patch)
    with pytest.raises(
        ConfigError, match=r"metric=eval/others/los: .* set it to one that they have: eval/others/loss$"
    ):
        sweep(mistyped.spec)
    right = Trials(trials.spec.model_copy(update={"metric": "eval/others/loss"}), trials.patch)
    right.runs = mistyped.runs
    log = sweep(right.spec).log
    assert log == read_log(right.place.log) and Decision(4, (1,), (0,)) in log
    with pytest.raises(ResumeError, match=r"^metric=null: the sweep rates was begun with eval/others/loss"):
        sweep(trials.spec)
