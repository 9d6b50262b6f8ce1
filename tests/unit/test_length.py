"""More steps than a run was planned for: refused where all of them would train nothing, and only there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.run.length import check_extension, warn_of_schedule
from tests.runs import LLAMA, make_config

STEPS = {"global_batch": 4, "max_steps": 2}
SMALL = {**LLAMA, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib: the curve of a run takes as long as its steps."""
    monkeypatch.setattr("raytune_fsdp.record.report.page.can_draw", lambda: False)


def rates(run: Path) -> list[float]:
    return [row["lr"] for row in read_trajectory(run / "metrics.jsonl")]


def begin(home: Path, method: str) -> FinetuneConfig:
    """A run of two steps, and as the first one of all, for adapters, the base that they are beside."""
    model: dict[str, Any] = {}
    if method != "full":
        pytest.importorskip("peft")
        base = make_config(home, SMALL, run={"name": "base"}, train=STEPS, export={"at_end": True})
        model = {"init": "pretrained", "architecture": None, "path": str(finetune(base).export)}
    config = make_config(
        home, SMALL, model=model, method={"type": method}, train=STEPS, parallel={"precision": "fp32"},
        export={"at_end": method != "full"}, optim={"lr": 3e-3, "warmup_steps": 1},
    )  # fmt: skip
    finetune(config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_steps_that_would_train_nothing_are_refused_with_ways_out_that_work(tmp_path: Path, method: str) -> None:
    config = begin(tmp_path, method)
    run, file = tmp_path / "runs" / "run", tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(ResumeError) as refused:
        finetune(load_config(file, ["--train.max_steps=5"]))
    said = str(refused.value)
    assert refused.value.exit_code == 2 and "\n" not in said
    assert said.startswith("train.max_steps=5 adds steps 3 to 5 with a learning rate of 0: ")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before

    # What it says, word for word.
    (anew,) = re.findall(r"plan it again with (--optim.schedule_steps 5), or ", said)
    (branch,) = re.findall(r"start a run from these weights with (--run.name NAME .*?)(?:, where |$)", said)
    branch = branch.replace("NAME", "branch").replace("DIR", str(run / "export"))
    assert finetune(load_config(file, [*shlex.split(branch), "--train.max_steps=3"])).trained == 3
    assert finetune(load_config(file, [*shlex.split(anew), "--train.max_steps=5"])).trained == 3
    assert min(rates(run)) > 0 and min(rates(tmp_path / "runs" / "branch")) > 0


def extend(tmp_path: Path, schedule: dict[str, Any], *, at: int, before: int | None, steps: int, **optim: Any) -> None:
    """As the start of a run of `steps` does it, whose checkpoint of step `at` is of a run that was to have `before`."""
    asked: dict[str, Any] = {"schedule": schedule, "warmup_ratio": 0}
    first = make_config(tmp_path, train={"global_batch": 2, "max_steps": before or at}, optim=asked)
    place = RunDir.of(first)
    place.path.mkdir(parents=True, exist_ok=True)
    place.plan.unlink(missing_ok=True)
    if before is not None:
        place.plan.write_text(json.dumps(resolve(first, 1).to_dict()))
    config = make_config(tmp_path, train={"global_batch": 2, "max_steps": steps}, optim={**asked, **optim})
    state = RunState(step=at, samples=2 * at, schedule_steps=before or at)
    plan = resolve(config, 1, planned_schedule=state.schedule_steps)
    check_extension(config, place, plan, CommittedCheckpoint(at, 1, place.checkpoints), state)


ENDS: dict[str, dict[str, Any]] = {
    "cosine": {"type": "cosine"},
    "linear": {"type": "linear"},
    "polynomial": {"type": "polynomial"},
    "wsd": {"type": "wsd"},
    "one_cycle": {"type": "one_cycle", "floor": 0.0},
}


@pytest.mark.parametrize("schedule", ENDS.values(), ids=ENDS)
def test_a_schedule_that_ends_at_zero_is_not_extended(tmp_path: Path, schedule: dict[str, Any]) -> None:
    for at, before, steps in ((8, 8, 12), (4, 8, 12), (8, None, 12), (8, 8, 9), (12, 12, 2**60)):
        with pytest.raises(ResumeError, match=f"adds steps? {(before or at) + 1}.*learning rate of 0") as refused:
            extend(tmp_path, schedule, at=at, before=before, steps=steps)
        (length,) = re.findall(r"--optim.schedule_steps (\d+)", str(refused.value))
        extend(tmp_path, schedule, at=at, before=before, steps=steps, schedule_steps=int(length))


@pytest.mark.parametrize("kind", [*ENDS, "constant", "inverse_sqrt"])
def test_a_floor_above_zero_is_extended(tmp_path: Path, kind: str) -> None:
    floor = {"floor": 1e-6} if kind in ENDS else {}
    extend(tmp_path, {"type": kind, **floor}, at=8, before=8, steps=12)


@pytest.mark.parametrize("schedule", ENDS.values(), ids=ENDS)
def test_a_run_that_was_planned_so_goes_on(tmp_path: Path, schedule: dict[str, Any]) -> None:
    """Stopped anywhere, also where all of its own steps that are left have the rate 0; and a shorter one."""
    for at in (1, 7, 9, 11, 12):
        extend(tmp_path, schedule, at=at, before=12, steps=12, schedule_steps=8)
    extend(tmp_path, schedule, at=8, before=12, steps=4)


def test_a_new_run_whose_schedule_ends_before_it_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warned(**optim: Any) -> str:
        caplog.clear()
        config = make_config(tmp_path, optim=optim, train={"max_steps": 12})
        warn_of_schedule(config, resolve(config, 1))
        return caplog.text

    assert "optim.schedule_steps=8: steps 9 to 12 of this run have a learning rate of 0" in warned(schedule_steps=8)
    assert "step 12 of this run" in warned(schedule_steps=11)
    assert not warned() and not warned(schedule_steps=12) and not warned(schedule_steps=100)
    assert not warned(schedule_steps=8, schedule={"type": "cosine", "floor": 0.1})
    assert not warned(schedule_steps=8, schedule={"type": "constant"})
