"""Runs as trials of Ray Tune, on a real one; and the process that trains them, without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_evaluations, read_trajectory
from raytune_fsdp.record.report.overview import last_step
from raytune_fsdp.tune.ray_tune.driven import RunDriver
from tests.ray.jobs import ROOT, config_of, events, is_there
from tests.runs import trajectory, write_tokens

LOCAL = {"launch": "local", "workers": 1, "device": "cpu"}
ON_RAY = {**LOCAL, "launch": "ray"}
LONG = {"global_batch": 10, "micro_batch": 2, "max_steps": 100_000}
SHORT = {**LONG, "max_steps": 12}
METRIC = "eval/held-out/loss"


def measured(directory: Path, every: int, **sections: Any) -> FinetuneConfig:
    held_out = directory / "held-out.jsonl"
    if not held_out.exists():
        write_tokens(held_out, rows=8, seed=5)
    data = {"eval": [{"path": str(held_out), "format": {"type": "tokens"}}]}
    return config_of(
        directory,
        **{"data": data, "eval": {"every": every}, "checkpoint": {"every": every, "keep_last": 2}, "cluster": LOCAL,
           **sections},
    )  # fmt: skip


def until(condition: Callable[[], bool], seconds: float = 120) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not in {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - began


def newest(config: FinetuneConfig) -> int:
    found = last_step(RunDir.of(config).metrics)
    return int(found["trajectory"]["step"]) if found else 0


@pytest.mark.slow
def test_a_process_trains_one_run_after_another_and_ends_after_its_program(tmp_path: Path) -> None:
    config = measured(tmp_path, 1000, train=LONG)
    place, env = RunDir.of(config), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    driver = RunDriver(cwd=tmp_path, env=env, log=tmp_path / "begins.txt")
    process = driver._process
    assert process.ppid() != os.getpid(), "Ray kills the children of a worker"
    log = tmp_path / "driver.txt"
    driver.train(config, log)
    until(lambda: newest(config) > 2 or driver.look() is not None)
    driver.stop()
    end = driver.look()
    assert end is not None and end.how == "stopped" and "is saved" in end.problem, log.read_text()
    assert committed(place.checkpoints)[-1].step == newest(config)

    other = measured(tmp_path, 12, train=SHORT, run={"name": "other"})
    began = time.monotonic()
    driver.train(other, log)
    until(lambda: driver.look() is not None)
    end = driver.look()
    assert end is not None and end.how == "finished", log.read_text()
    assert time.monotonic() - began < 8, "what the process had imported is there"
    alone = measured(tmp_path, 12, train=SHORT, run={"name": "alone"})
    assert read_trajectory(RunDir.of(other).metrics) == trajectory(alone, 1)

    stopped_at = newest(config)
    driver.train(config, log)
    until(lambda: newest(config) > stopped_at or driver.look() is not None)
    driver.close()  # as the end of the program does it
    until(lambda: not is_there(process), 30)
    assert not place.lock.exists() and committed(place.checkpoints)[-1].step == newest(config) > stopped_at


@pytest.mark.slow
def test_a_process_that_dies_or_refuses_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    config = measured(tmp_path, 4, train=LONG)
    driver = RunDriver(cwd=tmp_path, env=env, log=tmp_path / "begins.txt")
    driver.train(config, tmp_path / "driver.txt")
    until(lambda: newest(config) > 8 or driver.look() is not None)
    driver._process.kill()
    until(lambda: driver.look() is not None)
    end = driver.look()
    assert end is not None and end.how == "gone" and str(tmp_path / "driver.txt") in end.problem
    driver.close()

    driver = RunDriver(cwd=tmp_path, env=env, log=tmp_path / "begins.txt")
    driver.train(measured(tmp_path, 4, train=LONG, optim={"lr": 1e-2}), tmp_path / "driver.txt")
    until(lambda: driver.look() is not None)
    end = driver.look()
    assert end is not None and end.how == "refused" and "optim.lr" in end.problem
    until(lambda: not driver.alive, 30)
    driver.close()


# With Tune


def fit(
    directory: Path,
    config: FinetuneConfig,
    scheduler: Any = None,
    rates: Sequence[float] = (3e-3, 3e-1),
    **options: Any,
) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The results of a sweep over learning rates, and what Tune was told, by the directories of the runs.

    Its own result.json is not asked: when a trial goes on after a pause, Tune replaces the file by an older copy.
    """
    from ray import tune

    from raytune_fsdp.tune import RunTrial

    told: dict[str, list[tuple[int, float]]] = {}

    class Told(tune.Callback):  # type: ignore[misc]
        def on_trial_result(self, *, result: dict[str, Any], **_: Any) -> None:
            told.setdefault(result["run"], []).append((result["step"], result[METRIC]))

    options = {"max_concurrent_trials": 1, "metric": METRIC, "mode": "min", **options}
    kept = {name: options.pop(name) for name in ("failure_config", "checkpoint_config") if name in options}
    tuner = tune.Tuner(
        RunTrial,
        param_space={
            "base": config.model_dump(mode="json", exclude_unset=True),
            "optim.lr": tune.grid_search([*rates]),
        },
        tune_config=tune.TuneConfig(scheduler=scheduler, **options),
        run_config=tune.RunConfig(
            name="sweep", storage_path=str(directory / "tune"), verbose=0, callbacks=[Told()], **kept
        ),
    )
    return tuner.fit(), told


def on_record(run: str) -> dict[int, float]:
    return {step: each[METRIC] for step, each in read_evaluations(Path(run, "metrics.jsonl"), 10**9).items()}


def drivers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "raytune_fsdp.tune.ray_tune.driven" in process.cmdline() and is_there(process):
                found.append(process)
    return found


@pytest.fixture
def no_driver_left() -> Iterator[None]:
    before = drivers()
    yield
    until(lambda: set(drivers()) <= set(before), 40)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True])
def test_asha_sees_evaluations_and_ends_runs(tmp_path: Path, cluster: None, no_driver_left: None, reuse: bool) -> None:
    from ray.tune.schedulers import ASHAScheduler

    config = measured(tmp_path, 20, train=LONG, cluster=ON_RAY, optim={"warmup_ratio": 0.0})
    scheduler = ASHAScheduler(time_attr="step", grace_period=20, max_t=40, reduction_factor=2)
    results, told = fit(tmp_path, config, scheduler, reuse_actors=reuse)
    assert not results.errors
    assert [[step for step, _ in each] for each in told.values()] == [[20, 40], [20]], "the worse one ends at once"
    for run, values in ((Path(name), each) for name, each in told.items()):
        assert run.name.startswith("run-") and set(values) <= set(on_record(str(run)).items())
        assert not (run / "lock").exists() and newest_in(run) < LONG["max_steps"]
    best = Path(results.get_best_result().metrics["run"])
    whole = measured(
        tmp_path, 20, train={**LONG, "max_steps": 40}, optim={"warmup_ratio": 0.0, "schedule_steps": LONG["max_steps"]}
    )
    assert read_trajectory(best / "metrics.jsonl")[:40] == trajectory(whole, 1)


def newest_in(run: Path) -> int:
    return int(read_trajectory(run / "metrics.jsonl")[-1]["step"])


def in_turns() -> Any:
    """Pauses every trial after every result, and lets the other one go on."""
    from ray.tune.schedulers import FIFOScheduler, TrialScheduler

    class Turns(FIFOScheduler):  # type: ignore[misc]
        def on_trial_result(self, *_: Any) -> str:
            return str(TrialScheduler.PAUSE)

        def choose_trial_to_run(self, controller: Any) -> Any:
            waiting = [each for each in controller.get_trials() if each.status in ("PENDING", "PAUSED")]
            return min(waiting, key=lambda each: (each.last_result or {}).get("step", 0), default=None)

    return Turns()


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True])
def test_a_paused_trial_continues_its_own_run(tmp_path: Path, cluster: None, no_driver_left: None, reuse: bool) -> None:
    config = measured(tmp_path, 4, train=SHORT)
    results, told = fit(tmp_path, config, in_turns(), reuse_actors=reuse, max_concurrent_trials=2)  # paused ones count
    assert not results.errors and len(told) == 2
    for result in results:
        run = Path(result.metrics["run"])
        assert told[str(run)] == [*on_record(str(run)).items()] and [step for step, _ in told[str(run)]] == [4, 8, 12]
        alone = measured(
            tmp_path, 4, train=SHORT, run={"name": f"alone-{run.name}"}, optim={"lr": result.config["optim.lr"]}
        )
        assert read_trajectory(run / "metrics.jsonl") == trajectory(alone, 1)
    references = [*(tmp_path / "tune").rglob("run.json")]
    assert references and all(json.loads(each.read_text())["run"].startswith("run-") for each in references)
    assert all(sum(file.stat().st_size for file in each.parent.iterdir()) < 4096 for each in references)


@pytest.mark.slow
def test_a_killed_trial_lets_its_run_save_and_sees_every_value(
    tmp_path: Path, cluster: None, no_driver_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor is killed within a step() that waits: the run is asked to stop all the same, and Tune's next try goes
    on where it was. Meanwhile ranks have what Tune gives its actors as variables."""
    from ray import tune

    monkeypatch.setenv("AWS_SESSION_TOKEN", "told")  # Tune passes it on to its actors
    here = {**ON_RAY, "fork_workers": False}  # what is forked has its variables elsewhere than in /proc
    config = measured(tmp_path, 40, train={**SHORT, "max_steps": 400}, cluster=here, checkpoint={"every": None})
    killed: list[float] = []
    have: set[str] = set()

    def kill() -> None:
        storage = Path(config.run.storage)
        with suppress(AssertionError):
            until(lambda: any(newest_of(run) > 60 for run in storage.glob("run-*")), 200)
            (run,) = [run for run in storage.glob("run-*") if (run / "lock").exists()]
            token = (run / "lock").read_text()
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if process.environ().get("AWS_SESSION_TOKEN") == "told":
                        have.add(process.cmdline()[0].partition(".")[0])
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if "ray::RunTrial" in " ".join(process.cmdline()):
                        process.send_signal(signal.SIGKILL)
            killed.append(until(lambda: not (run / "lock").exists() or (run / "lock").read_text() != token, 60))

    killer = threading.Thread(target=kill)
    killer.start()
    results, told = fit(tmp_path, config, rates=[3e-3], failure_config=tune.FailureConfig(max_failures=2))
    killer.join()
    assert not results.errors and killed and killed[0] < 30, killed
    assert any("RayTrainWorker" in name for name in have), have
    ((run, values),) = told.items()
    assert on_record(run).keys() == {step for step, _ in values} == set(range(40, 401, 40))
    ended = [event["fields"].get("status") for event in events(Path(run), "attempt_ended")]
    assert ended == ["interrupted", "finished"], "it has saved, and nothing was lost"


def newest_of(run: Path) -> int:
    found = last_step(run / "metrics.jsonl")
    return int(found["trajectory"]["step"]) if found else 0


SWEEP = """
import json, sys
import ray
from ray import tune
from raytune_fsdp.tune import RunTrial

if __name__ == "__main__":
    base, storage = json.load(open(sys.argv[1])), sys.argv[2]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=128 << 20, _temp_dir=sys.argv[3])
    tune.Tuner(
        RunTrial,
        param_space={"base": base},
        run_config=tune.RunConfig(
            name="sweep", storage_path=storage, verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=int(sys.argv[4])),
        ),
    ).fit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("frequency", [0, 1])
def test_a_restored_sweep_sees_every_value(
    tmp_path: Path, cluster: None, no_driver_left: None, tmp_path_factory: pytest.TempPathFactory, frequency: int
) -> None:
    """The program of the sweep is killed with its Ray; with references of Tune's, and without any."""
    import tempfile

    from ray import tune

    from raytune_fsdp.tune import RunTrial

    config = measured(tmp_path, 100, train={**SHORT, "max_steps": 600})
    (tmp_path / "base.json").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    (tmp_path / "sweep.py").write_text(SWEEP)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        program = psutil.Popen(
            [sys.executable, "sweep.py", "base.json", str(tmp_path / "tune"), temporary, str(frequency)],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        results_of = (tmp_path / "tune").rglob
        until(lambda: any(each.stat().st_size for each in results_of("result.json")) or not program.is_running(), 200)
        assert program.poll() is None, "it has ended before it could be killed"
        ours = [program, *program.children(recursive=True)]
        for process in ours:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(ours, 30)
    until(lambda: not drivers(), 40)
    storage = Path(config.run.storage)
    (run,) = storage.glob("run-*")
    reached = newest_in(run)
    assert reached >= 100 and committed(str(run / "checkpoints"))[-1].step == reached, "it was asked to stop, and saved"

    (result,) = tune.Tuner.restore(str(tmp_path / "tune" / "sweep"), RunTrial, resume_errored=True).fit()
    assert result.error is None
    steps = [int(step) for step in result.metrics_dataframe["step"]]
    assert set(steps) == set(range(100, 601, 100)) and steps[-1] == 600
    assert [*storage.glob("run-*")] == [run], "the same trial, the same run"
    alone = measured(tmp_path, 100, train={**SHORT, "max_steps": 600}, run={"name": "alone"})
    assert read_trajectory(run / "metrics.jsonl") == trajectory(alone, 1)


@pytest.mark.slow
def test_a_trial_that_takes_over_another_one_is_a_fork(tmp_path: Path, cluster: None, no_driver_left: None) -> None:
    """Population-based training of two: at step 20 the worse one goes on as the better one was, with another rate."""
    from ray.tune.schedulers import PopulationBasedTraining

    config = measured(
        tmp_path, 20, train={**SHORT, "max_steps": 40}, optim={"warmup_ratio": 0.0},
        checkpoint={"every": 20, "keep_last": None},
    )  # fmt: skip
    scheduler = PopulationBasedTraining(
        time_attr="step", perturbation_interval=20, synch=True, quantile_fraction=0.5,
        hyperparam_mutations={"optim.lr": [3e-3, 3e-1]}, resample_probability=0.0,
    )  # fmt: skip
    results, told = fit(tmp_path, config, scheduler, max_concurrent_trials=2)
    assert not results.errors
    (child,) = [Path(run) for run in told if (Path(run) / "lineage.json").exists()]
    better, worse = sorted((Path(run) for run in told if run != str(child)), key=lambda run: on_record(str(run))[20])
    assert child.name.startswith(f"{worse.name}-"), "a run of the worse trial's own"
    (link,) = json.loads((child / "lineage.json").read_text())["forks"]
    assert (link["run"], link["step"]) == (better.name, 20)
    (reference,) = {
        each["digest"]
        for each in map(json.loads, (file.read_text() for file in (tmp_path / "tune").rglob("run.json")))
        if (each["run"], each["step"]) == (better.name, 20)
    }
    assert link["digest"] == reference
    assert [row["step"] for row in read_trajectory(child / "metrics.jsonl")] == [*range(21, 41)]
    assert [step for step, _ in told[str(child)]] == [40] and [step for step, _ in told[str(better)]] == [20, 40]
