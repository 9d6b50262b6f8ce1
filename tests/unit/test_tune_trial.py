"""What a trial of Ray Tune does before and beside its run: config, reference, the environment of its driver. tests/ray
has the rest."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError, ResumeError, TrainingError
from raytune_fsdp.base.untrusted import read_json
from raytune_fsdp.checkpoint.catalogue import committed, digest_of
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.environment import with_package
from raytune_fsdp.launch.notices import STOP_SECONDS, notices_of
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.tune.ray_tune import driven
from raytune_fsdp.tune.ray_tune.driven import RunDriver
from raytune_fsdp.tune.ray_tune.environment import environment_of_driver
from raytune_fsdp.tune.ray_tune.reference import REFERENCE_FILE, TrialReference, check_reference, config_of
from tests.unit.test_checkpoint_catalogue import write

BASE: dict[str, Any] = {
    "run": {"name": "rates"},
    "model": {"path": "m"},
    "data": {"train": [{"path": "rows.jsonl"}], "seq_len": 8},
    "train": {"global_batch": 2, "max_steps": 9},
    "export": {"at_end": False},
}


def test_places_of_a_trial_begin_where_tune_was_started(tmp_path: Path) -> None:
    given = {"base": BASE, "run.storage": "all", "checkpoint.storage": "kept"}
    config = config_of(given, tmp_path)
    assert RunDir.of(config) == RunDir(tmp_path / "all" / "rates", str(tmp_path / "kept/rates/checkpoints"))
    config = config_of({**given, "checkpoint.storage": "s3://bucket/kept"}, tmp_path)
    assert RunDir.of(config).checkpoints == "s3://bucket/kept/rates/checkpoints"
    assert config_of({"base": BASE}, tmp_path).checkpoint.storage is None


def test_what_tune_decides_itself_is_refused(tmp_path: Path) -> None:
    stopped = {**BASE, "run": {"name": "rates", "stop_after": 4}}
    with pytest.raises(
        ConfigError, match=r"run.stop_after=4: Tune says after which step .*RunConfig\(stop=\{'step': 4"
    ):
        config_of({"base": stopped}, tmp_path)
    assert config_of({"base": stopped, "run.stop_after": None}, tmp_path).run.stop_after is None


def test_an_empty_section_is_one(tmp_path: Path) -> None:
    given = {"base": {**BASE, "eval": {"every": 2}}, "eval": {"early_stop": {}}}
    config = config_of(given, tmp_path)
    assert config.eval.early_stop is not None and config.eval.every == 2


def _reference(place: RunDir, step: int, digest: str | None = None) -> TrialReference:
    if digest is None:
        digest = next(digest_of(each) for each in committed(place.checkpoints) if each.step == step)
    return TrialReference(
        trial="t0", run=place.path.name, step=step, digest=digest, seen=step, given="0" * 16, fork=None
    )  # fmt: skip


def test_a_reference_is_to_what_is_there(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "runs" / "rates-t0", str(tmp_path / "runs" / "rates-t0" / "checkpoints"))
    for step in (4, 8):
        write(Path(place.checkpoints), step, content=b"x%d" % step)
    found = _reference(place, 4)
    check_reference(found, place, forks=True)
    write(Path(place.checkpoints), 4, attempt=2, content=b"y")
    with pytest.raises(ResumeError, match=r"that run has another one of that step, with the digest [0-9a-f]{64}"):
        check_reference(found, place, forks=True)
    gone = _reference(place, 6, "1" * 64)
    check_reference(gone, place)  # its own run goes on from its newest
    with pytest.raises(ResumeError, match=r"step 6 .*that run has pruned it.*checkpoint.keep_last=null"):
        check_reference(gone, place, forks=True)
    elsewhere = RunDir(tmp_path / "other" / "rates-t0", str(tmp_path / "other" / "rates-t0" / "checkpoints"))
    for forks in (False, True):
        with pytest.raises(ResumeError, match=r"run.storage=.*/other: .* its run rates-t0 has none in "):
            check_reference(found, elsewhere, forks=forks)


def test_ranks_have_the_variables_of_tunes_ray() -> None:
    began = {"HOME": "/root", "PYTHONPATH": "/mine", "RAY_JOB_ID": "01", STOP_SECONDS: ""}
    given = {"env_vars": {"HF_HOME": "/models"}, "working_dir": "gcs://a.zip"}
    env = environment_of_driver(began, seconds=90.0, address="10.0.0.1:6379", runtime_env=given)
    assert json.loads(env["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"] == given
    assert (env["RAY_ADDRESS"], env["HOME"]) == ("10.0.0.1:6379", "/root") and "RAY_JOB_ID" not in env
    assert env["PYTHONPATH"].split(os.pathsep) == [str(Path(__file__).parents[2]), "/mine"]
    # Not the 3 s of `ray job stop`, which does not end it.
    assert notices_of(ClusterConfig(), env, ray=True) == {"job_stop": 90.0, "scheduler": 90.0}
    alone = environment_of_driver(began, seconds=30.0, address=None, runtime_env={})
    assert {"RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"}.isdisjoint(alone)


def test_a_process_that_does_not_start_leaves_no_file_open(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(TrainingError, match="a process for the run could not be started"):
        RunDriver(cwd=tmp_path / "nowhere", env={}, log=tmp_path / "log.txt")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_of_the_working_directory_is_no_module_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('code of a stranger')")
    env = with_package({name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    driver = RunDriver(cwd=tmp_path, env=env, log=tmp_path / "log.txt")
    assert driver.alive and not (tmp_path / "log.txt").read_text()
    driver.close()


def test_a_process_that_ends_before_its_first_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driven, "_start", lambda orders, answers, **_: (os.close(orders), os.close(answers)))
    began = time.monotonic()
    with pytest.raises(TrainingError, match="the process for the run ended at once"):
        RunDriver(cwd=tmp_path, env={}, log=tmp_path / "log.txt")
    assert time.monotonic() - began < 10


def test_a_stop_has_an_end_although_the_process_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits in the kernel is there after SIGKILL, too."""
    monkeypatch.setattr(driven, "_AT_ONCE_SECONDS", 0.05)
    killed: list[int] = []
    driver = RunDriver.__new__(RunDriver)
    (driver._answers, answers), (orders, driver._orders) = os.pipe(), os.pipe()
    os.set_blocking(driver._answers, False)
    driver._rest, driver._ending, driver._end, driver._log = b"", False, None, Path("log.txt")
    driver._process = SimpleNamespace(  # type: ignore[assignment]
        pid=7, is_running=lambda: True, status=lambda: "disk-sleep", kill=lambda: killed.append(7)
    )
    driver.stop(0.0)
    end = driver.look()
    assert killed == [7] and end is not None and (end.how, driver.alive) == ("gone", False)
    driver.close()
    os.close(orders), os.close(answers)


# With Tune's class, in this process


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trial that was not set up yet: Tune was started in `from`, and has sent the trial elsewhere."""
    pytest.importorskip("ray")
    from raytune_fsdp.tune import RunTrial

    for name in ("from", "sent"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "sent")
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(tmp_path / "from"))
    made = RunTrial.__new__(RunTrial)
    made._trial_info = SimpleNamespace(trial_id="t0")
    return made


def test_a_reference_is_written_without_training_what_is_there(trial: Any, tmp_path: Path) -> None:
    """Also where checkpoint.storage is a relative path; and a complete run without any checkpoint is an error."""
    trial.setup({"base": BASE, "checkpoint.storage": "kept"})
    place = RunDir(tmp_path / "from/runs/rates-t0", str(tmp_path / "from/kept/rates-t0/checkpoints"))
    path = write(Path(place.checkpoints), 4, content=b"x")
    trial._seen = 4
    trial.save_checkpoint(str(tmp_path))
    kept = read_json(tmp_path / REFERENCE_FILE, limit=1 << 16)
    assert (kept["run"], kept["step"], kept["digest"]) == ("rates-t0", 4, _reference(place, 4).digest)
    trial.load_checkpoint(str(tmp_path))
    path.rename(tmp_path / path.name)
    with pytest.raises(ResumeError, match="its run rates-t0 has none in"):
        trial.load_checkpoint(str(tmp_path))
    place.path.mkdir(parents=True)
    append_event(place.events, names.ATTEMPT_ENDED, attempt=1, fields={"status": "finished"})
    trial.setup({"base": BASE, "checkpoint.storage": "kept"})
    with pytest.raises(TrainingError, match="the run is complete, and .* has no checkpoint: bring its"):
        trial.save_checkpoint(str(tmp_path))


def test_a_run_whose_trial_has_failed_does_not_train_on(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `save` raises, Tune asks for nothing more, and its actor may stay for another trial."""
    from raytune_fsdp.tune.ray_tune import trial as module

    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    trial.setup({"base": BASE})
    stopped = threading.Event()
    monkeypatch.setattr(trial, "_stop", stopped.set)
    with pytest.raises(TrainingError), trial._called():
        raise TrainingError("a checkpoint could not be written")
    assert stopped.wait(10)


def test_only_what_another_trial_still_has_is_taken_over(trial: Any, tmp_path: Path) -> None:
    trial.setup({"base": BASE})
    other = RunDir(tmp_path / "from/runs/rates-t1", str(tmp_path / "from/runs/rates-t1/checkpoints"))
    path = write(Path(other.checkpoints), 4, content=b"x")
    write(Path(other.checkpoints), 8, content=b"x")
    TrialReference(
        trial="t1", run="rates-t1", step=4, digest=_reference(other, 4).digest, seen=4, given="0" * 16, fork=None
    ).write(tmp_path)  # fmt: skip
    trial.load_checkpoint(str(tmp_path))
    assert trial._fork == {"run": "rates-t1", "step": 4} and trial._config.run.name.startswith("rates-t0-")
    path.rename(tmp_path / path.name)
    with pytest.raises(ResumeError, match="that run has pruned it"):
        trial.load_checkpoint(str(tmp_path))
    write(Path(trial._place.checkpoints), 6, content=b"z")  # the fork has begun, and needs it no more
    trial.load_checkpoint(str(tmp_path))


def test_how_long_a_stop_takes_is_a_number(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_SECONDS, "soon")
    with pytest.raises(ConfigError, match=f"{STOP_SECONDS}=soon is not a number of seconds"):
        trial.setup({"base": BASE})
