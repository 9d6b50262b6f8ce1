"""What of a config others may read, and what the mark in place of a secret means when it is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.redaction import REDACTED
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config, recorded_text
from raytune_fsdp.config.recorded import recorded, shown_uri
from tests.config_text import dump_config
from tests.planted import FILL, SHAPES

NEEDED = ["--run.name=x", "--model.path=m", "--data.train.0.path=a", "--train.global_batch=4", "--train.max_steps=1"]


def config(**sections: dict[str, Any]) -> FinetuneConfig:
    needed: dict[str, Any] = {
        "run": {"name": "x"},
        "model": {"path": "m"},
        "data": {"train": [{"path": "a"}]},
        "train": {"global_batch": 4, "max_steps": 1},
    }
    return FinetuneConfig.model_validate(needed | sections)


def refused(path: Path | None, *flags: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load_config(path, flags)
    return str(failure.value).splitlines()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "one_cycle"])
def test_the_config_of_a_run_is_read_again(tmp_path: Path, schedule: str) -> None:
    """It has every field, also those that their user may not write."""
    made = config(optim={"schedule": {"type": schedule}})
    (tmp_path / "config.yaml").write_text(recorded_text(made))
    assert load_config(tmp_path / "config.yaml") == made


@pytest.mark.parametrize("shape", SHAPES)
def test_a_secret_of_any_shape_is_marked_wherever_it_stands(shape: str) -> None:
    secret = SHAPES[shape]
    made = config(
        cluster={"env": {"SETTING": secret, "WITHIN": f"--key {secret} --seed 1"}},
        eval={"prompts": [f"say {secret}"]},
        tracking={"mlflow": {"uri": f"http://alice:{secret.split()[-1]}@host:5000", "experiment": secret}},
    )
    text = recorded_text(made)
    assert secret not in text and FILL not in text and secret in dump_config(made)
    tree = yaml.safe_load(text)
    assert tree["cluster"]["env"] == {"SETTING": REDACTED, "WITHIN": REDACTED}
    assert tree["tracking"]["mlflow"]["uri"] == "http://host:5000"
    assert secret not in repr(made.cluster) and "alice" not in repr(made.tracking)


def test_variables_are_secret_by_name_and_others_stay() -> None:
    env = {"AWS_SECRET_ACCESS_KEY": "plain", "DB_PASS": "plain", "HF_TOKEN": "plain", "NCCL_SOCKET_IFNAME": "eth0"}
    marked = {**dict.fromkeys(env, REDACTED), "NCCL_SOCKET_IFNAME": "eth0"}
    assert yaml.safe_load(recorded_text(config(cluster={"env": env})))["cluster"]["env"] == marked


def test_a_prompt_that_speaks_of_secrets_is_none() -> None:
    made = config(eval={"prompts": ["What is a token: a word? password=what"]})
    assert recorded_text(made) == dump_config(made)


def test_a_mark_takes_the_variable_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(cluster={"env": {"DB_PASSWORD": "hunter2", "PLAIN": "1"}})
    file = tmp_path / "config.yaml"
    file.write_text(recorded_text(made))
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    assert load_config(file) == made
    monkeypatch.delenv("DB_PASSWORD")
    (line,) = refused(file)
    assert line.startswith(f"cluster.env.DB_PASSWORD: {REDACTED} stands for a secret that this config does not hold")
    assert "set DB_PASSWORD in the environment, or write the value" in line and f"(from {file} line " in line
    assert load_config(file, ["--cluster.env.DB_PASSWORD=new"]).cluster.env["DB_PASSWORD"] == "new"


def test_a_mark_is_no_value_of_any_other_field(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(recorded_text(config(eval={"prompts": ["a", SHAPES["aws"]]}, model={"path": SHAPES["aws"]})))
    (line,) = refused(file)
    assert line.startswith(f"model.path, eval.prompts.1: {REDACTED} stands for a secret")


def test_an_old_file_may_hold_anything() -> None:
    for tree in ({}, {"cluster": 3, "tracking": []}, {"cluster": {"env": [1]}, "tracking": {"mlflow": 1}}):
        assert recorded(tree) == tree


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://alice:hunter2@mlflow.internal:5000/x", "https://mlflow.internal:5000/x"),
        ("https://hunter2@mlflow.internal", "https://mlflow.internal"),
        ("postgresql://mlflow:hun/ter2@db:5432/mlflow?sslmode=require", "postgresql://db:5432/mlflow?sslmode=require"),
        ("mysql+pymysql://mlflow:p@hunter2@db/mlflow", "mysql+pymysql://db/mlflow"),
        ("sqlite:////shared/a@b/mlflow.db", "sqlite:////shared/a@b/mlflow.db"),
        ("databricks://profile:prefix", "databricks://profile:prefix"),
        ("runs/mlruns", "runs/mlruns"),
    ],
)
def test_a_tracking_uri_is_shown_without_its_user(uri: str, shown: str) -> None:
    assert shown_uri(uri) == shown
    assert (
        yaml.safe_load(recorded_text(config(tracking={"mlflow": {"uri": uri}})))["tracking"]["mlflow"]["uri"] == shown
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--model.path=s3://AKIA:hunter2@bucket/m"], "model.path: must not hold credentials"),
        (["--model.tokenizer=https://me:hunter2@host/m"], "model.tokenizer: must not hold credentials"),
        (["--data.train.0.path=s3://AKIA:hunter2@bucket/x"], "data.train.0.path: must not hold credentials"),
        (["--checkpoint.storage=s3://AKIA:hunter2@bucket/x"], "checkpoint.storage: must not hold credentials"),
        (["--model.overrides.a.password=hunter2"], "model.overrides: a.password looks like a secret"),
        ([f"--model.overrides.note={SHAPES['jwt']}"], "model.overrides: note looks like a secret"),
        (["--tracking.mlflow.pasword=hunter2", "--tracking.mlflow.token=hunter2"], "tracking.mlflow.token=<redacted>"),
        (["cluster.env.DB_PASSWORD=hunter2"], "cluster.env.DB_PASSWORD=<redacted>"),
        (["--cluster.env", "{DB_PASSWORD: hunter2"], "--cluster.env={DB_PASSWORD: <redacted>"),
        ([f"--cluster.env=[{SHAPES['slack']}]"], "cluster.env"),
    ],
)  # fmt: skip
def test_an_error_does_not_show_the_secret(flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *NEEDED, *flags]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and FILL not in shown
    assert "hunter2" not in shown.replace("tracking.mlflow.pasword=hunter2", "")


@pytest.mark.parametrize("field", ["path", "tokenizer"])
def test_an_empty_model_is_refused(field: str) -> None:
    (line,) = refused(None, *NEEDED, f"--model.{field}=")
    assert line.startswith(f"model.{field}='': must not be empty: name a directory, a model on the hub")
