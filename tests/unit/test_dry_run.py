"""A dry run: the config of its two steps, the directory that goes whatever happens, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config, recipes
from raytune_fsdp.plan.plan import least_ranks, resolve
from raytune_fsdp.tools.dry_run.outcome import DryRun, in_words, to_json
from raytune_fsdp.tools.dry_run.scratch import scratch
from raytune_fsdp.tools.dry_run.trial import trial_of

AS_IT_IS = ("model", "method", "parallel")
ROWS = [{"path": "rows.jsonl"}]


def config_of(**sections: dict[str, Any]) -> FinetuneConfig:
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "mine", "storage": "/data/runs", "seed": 7, "resume": "always"},
        "model": {"path": "gpt2"},
        "data": {"train": ROWS, "seq_len": 128},
        "train": {"max_steps": 1000, "global_batch": 16, "micro_batch": 2, "log_every": 50},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return FinetuneConfig.model_validate(values)


@pytest.mark.parametrize("recipe", sorted(recipes()))
def test_a_trial_is_the_run_for_two_steps(recipe: str, tmp_path: Path) -> None:
    config = load_config(recipe, ["--run.name=mine"])
    trial = trial_of(config, tmp_path)
    assert FinetuneConfig.model_validate(trial.model_dump()) == trial, "it is a config that a user may write"
    for section in AS_IT_IS:
        assert getattr(trial, section) == getattr(config, section)
    same = {"train", "seq_len", "packing", "window", "shuffle", "long_documents"}
    assert trial.data.model_dump(include=same) == config.data.model_dump(include=same)
    assert trial.cluster.model_dump(exclude={"max_failures"}) == config.cluster.model_dump(exclude={"max_failures"})
    plan = resolve(trial, max(2, least_ranks(config)))
    assert (plan.steps, plan.eval_every, plan.log_every) == (2, 1, 1)
    assert plan.division.global_batch == config.train.global_batch
    assert plan.division.micro_batch == config.train.micro_batch


def test_a_trial_writes_nowhere_else_and_only_trains(tmp_path: Path) -> None:
    config = config_of(
        checkpoint={"every": 10, "keep_best": 2, "storage": "s3://bucket/there"},
        export={"every": 10, "push": "me/mine"},
        eval={"every": 10, "at_start": True, "prompts": ["who?"], "where": "ranks"},
        data={"eval": [{"name": "seen", "path": "seen.jsonl"}], "cache": {"path": "/data/cache", "max_gb": 3.0}},
        tracking={
            "wandb": {"enabled": True}, "tensorboard": {"enabled": True}, "prometheus": {"enabled": True},
            "mlflow": {"enabled": True, "uri": "http://there"}, "documents": True,
        },
        profile={"steps": [1, 2]},
        cluster={"max_failures": -1},
    )  # fmt: skip
    trial = trial_of(config, tmp_path)
    assert trial.run.storage == str(tmp_path) and trial.run.resume == "auto" and trial.run.seed == 7
    assert trial.data.cache.path == str(tmp_path / "cache") and trial.data.cache.max_gb == 3.0
    assert trial.checkpoint.storage is None and trial.checkpoint.every is None and not trial.checkpoint.keep_best
    assert not trial.export.at_end and trial.export.every is None and trial.export.push is None
    assert trial.data.eval == [] and not trial.eval.prompts and not trial.eval.at_start
    chosen = trial.tracking
    assert not any(each.enabled for each in (chosen.wandb, chosen.tensorboard, chosen.prometheus, chosen.mlflow))
    assert chosen.documents, "it is computed in the step"
    assert trial.profile.steps == [] and trial.cluster.max_failures == 0
    assert "there" not in json.dumps(trial.model_dump(mode="json")), "no address is left in it"


def test_rows_that_are_held_out_stay_out(tmp_path: Path) -> None:
    config = config_of(data={"eval": {"fraction": 0.1}})
    assert trial_of(config, tmp_path).data.eval == config.data.eval


@pytest.mark.parametrize(
    "sections",
    [
        {"optim": {"warmup_steps": 100}},
        {"train": {"max_steps": None, "epochs": 3.0}, "optim": {"warmup_steps": 100}},
        {"train": {"max_steps": 1}},
        {"optim": {"schedule": {"type": "one_cycle"}}},
    ],
)
def test_a_warmup_that_is_longer_than_two_steps_fits(sections: dict[str, Any], tmp_path: Path) -> None:
    plan = resolve(trial_of(config_of(**sections), tmp_path), 2)
    assert plan.steps == 2 and plan.warmup_steps <= plan.schedule_steps


def test_scratch_leaves_no_directory_that_was_not_there(tmp_path: Path) -> None:
    there = tmp_path / "not" / "there"
    with pytest.raises(RuntimeError), scratch(there, "dry-run-") as directory:
        assert directory.parent == there and not list(directory.iterdir())
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text("x")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_scratch_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    there = tmp_path / "runs"
    with scratch(there, "dry-run-") as directory:
        (there / "another").write_text("came meanwhile")
    assert not directory.exists() and [each.name for each in there.iterdir()] == ["another"]


def test_scratch_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(ConfigError, match="run.storage: .*file/runs: .*; name a directory")
    with refused, scratch(tmp_path / "file" / "runs", "dry-run-"):
        pass


KILLED = """
import os, sys
from pathlib import Path
from raytune_fsdp.tools.dry_run.scratch import scratch
with scratch(Path(sys.argv[1]), "dry-run-") as directory:
    (directory / "file").write_text("x")
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_scratch_goes_when_its_process_and_its_group_are_killed(tmp_path: Path) -> None:
    there = tmp_path / "runs"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(there)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert (directory / "file").exists()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30
    while there.exists():
        assert time.monotonic() < deadline, list(there.rglob("*"))
        time.sleep(0.05)


MEASURED = DryRun(
    name="mine", ranks=8, device="cuda: NVIDIA H100 80GB HBM3", memory_bytes=60 << 30, memory_bytes_least=59 << 30,
    reserved_bytes=66 << 30, device_bytes=79 << 30, predicted_bytes=58 << 30, predicted_where="norm, head and loss",
    host_bytes=100 << 30, load_seconds=41.23, first_step_seconds=8.214, second_step_seconds=3.1,
    tokens_per_second=84_500.0, mfu=0.431, filled=0.987, trained_on=0.612, steps=1000, steps_are_estimated=False,
    run_seconds=3100.0,
)  # fmt: skip


def test_what_was_measured_in_words() -> None:
    lines = list(in_words(MEASURED))
    assert lines == [
        "mine fits: 2 steps of a dry run on 8 ranks, cuda: NVIDIA H100 80GB HBM3",
        "memory     60.00 GiB allocated at most (the least: 59.00 GiB)",
        "reserved   66.00 GiB at most of 79.00 GiB",
        "predicted  58.00 GiB of tensors at the peak (norm, head and loss)",
        "load       41.2 s until the first step",
        "steps      the first 8.21 s, the second 3.1 s",
        "speed      84.5k tokens/s, MFU 43.1 %",
        "data       98.7 % of a step are tokens, 61.2 % of them trained on",
        "run        1,000 steps x 3.1 s = 51m 40s, without evaluations and what is saved",
        "nothing is left of it",
    ]
    assert json.loads(to_json(MEASURED))["memory_bytes"] == 60 << 30


def test_what_is_not_known_is_said() -> None:
    unknown = replace(
        MEASURED, reserved_bytes=None, predicted_bytes=None, predicted_where="no such device", mfu=None, ranks=1,
        steps_are_estimated=True,
    )  # fmt: skip
    said = "\n".join(in_words(unknown))
    assert "memory     60.00 GiB of the host in the largest rank\n" in said and "reserved" not in said
    assert "predicted  not known: no such device" in said and "MFU" not in said
    assert "about 1,000 steps x 3.1 s = about 51m 40s" in said


def test_json_is_of_dry_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "demo", "--json"]) == 2
    assert "--json goes with --dry-run" in capsys.readouterr().err
