"""A run that is stopped by the program that called `finetune`, or by `raytune-fsdp stop`, goes on as if nothing was."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from raytune_fsdp import CheckpointCommitted, Happening, Interrupted, StepEnded, StopHandle, finetune
from raytune_fsdp.cli.main import main
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_trajectory
from tests.runs import make_config

SCRIPT = """
from raytune_fsdp import finetune

if __name__ == "__main__":
    finetune("run.yaml")
"""
SECTIONS = {"checkpoint": {"every": None}, "train": {"max_steps": 600}}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_functions_that_raise_block_and_flood_and_a_stop_change_nothing_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = make_config(tmp_path, run={"name": "alone"}, **SECTIONS)
    finetune(alone)
    config, handle, told = make_config(tmp_path, **SECTIONS), StopHandle(), list[Happening]()

    def hinders(happening: Happening) -> None:
        told.append(happening)
        if happening.step == 3:
            time.sleep(0.5)
        if happening.step >= 5:
            handle.stop()
        if happening.step % 2:
            raise RuntimeError("odd")

    with pytest.raises(Interrupted, match=r"stopped as it was asked to after step \d+, which is saved; the same "):
        finetune(config, on=hinders, stop=handle)
    stopped = len(read_trajectory(RunDir.of(config).metrics))
    assert 5 <= stopped < 600
    assert [each.step for each in told if isinstance(each, StepEnded)] == [*range(1, stopped + 1)]
    assert isinstance(told[-1], CheckpointCommitted) and told[-1].step == stopped
    assert len([record for record in caplog.records if "a function in on= raised" in record.getMessage()]) == 1
    result = finetune(config, on=[told.append], stop=handle)  # the same handle: it has done its work
    assert result.trained == 600 - stopped and not [*RunDir.of(config).path.glob("stop.*")]
    assert [each.step for each in told if isinstance(each, StepEnded)] == [*range(1, 601)]
    assert read_trajectory(RunDir.of(config).metrics) == read_trajectory(RunDir.of(alone).metrics)


@pytest.mark.timeout(300)
def test_a_command_stops_a_run_on_two_ranks_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = {**SECTIONS, "train": {"max_steps": 20_000}}
    config = make_config(tmp_path, **sections)
    values = config.model_dump(mode="json")
    values["cluster"]["workers"] = 2
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "script.py").write_text(SCRIPT)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    (place.path / "stop.000000000000.asked").touch()  # left by somebody who was killed: not for this command
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as training:
        deadline = time.monotonic() + 120
        while not place.metrics.exists() or len(read_trajectory(place.metrics)) < 3:
            assert training.poll() is None and time.monotonic() < deadline, training.communicate()[0]
            time.sleep(0.2)
        assert main(["stop", str(place.path), "--wait", "60"]) == 0
        out, _ = training.communicate(timeout=60)
    step = len(read_trajectory(place.metrics))
    assert (
        capsys.readouterr().out
        == f"{place.path} has stopped, at step {step:,} of 20,000, which is saved; the same command continues it\n"
    )
    assert training.returncode == 1 and f"stopped as it was asked to after step {step}, which is saved" in out
    assert not [*place.path.glob("stop.*")] and [*place.path.glob(f"checkpoints/step-{step:08d}.*")]
