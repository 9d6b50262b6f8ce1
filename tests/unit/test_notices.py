"""How long what ends a run leaves it, and what is said where its saves take longer."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from huggingface_hub.errors import GatedRepoError

from raytune_fsdp.base.errors import JOB_CONFIG, ConfigError
from raytune_fsdp.base.measured import Saved
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch import notices
from raytune_fsdp.launch.notices import STOP_SECONDS, notices_of
from raytune_fsdp.launch.worker import alone, work
from raytune_fsdp.model.directory.hub_weights import refused
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.console import event_in_words
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.run.assemble import LauncherHooks
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume_point import agree
from raytune_fsdp.run.saving import Saves
from tests.runs import make_config

JOB, POD = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("cluster", "environment", "ray", "expected"),
    [
        ({}, {}, True, {}),
        ({}, {"RAY_JOB_STOP_WAIT_TIME_S": "600"}, True, {}),  # nothing stops what is no job
        ({}, JOB, True, {"job_stop": 3.0}),
        ({}, {**JOB, "RAY_JOB_STOP_WAIT_TIME_S": "2400"}, True, {"job_stop": 2400.0}),
        ({"spot_notice": "aws"}, JOB, True, {"spot": 120.0, "job_stop": 3.0}),
        ({"spot_notice": "gcp"}, {}, True, {"spot": 30.0}),
        ({}, POD, True, {"pod": 30.0}),
        ({}, {**POD, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "2400"}, True, {"pod": 2400.0}),
        ({}, {**POD, STOP_SECONDS: "0"}, True, {"scheduler": 0.0}),
        ({"spot_notice": "aws"}, {**JOB, **POD, STOP_SECONDS: "900"}, False, {"scheduler": 900.0}),
    ],
)
def test_who_gives_how_long(
    cluster: dict[str, Any], environment: dict[str, str], ray: bool, expected: dict[str, float]
) -> None:
    assert notices_of(ClusterConfig.model_validate(cluster), environment, ray=ray) == expected


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_what_is_no_number_of_seconds_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{STOP_SECONDS}={text} is not a number of seconds"):
        notices_of(ClusterConfig(), {STOP_SECONDS: text}, ray=False)


def test_a_ray_job_hears_whose_environment_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    error = GatedRepoError.__new__(GatedRepoError)  # without the answer of an HTTP library, of which versions differ
    assert str(refused(error, "model.path=a/b")).endswith("then set HF_TOKEN")
    monkeypatch.setenv(JOB_CONFIG, "{}")
    assert str(refused(error, "model.path=a/b")).endswith(
        "then set HF_TOKEN in the environment of `ray start`, which a job has instead of yours"
    )


def test_the_defaults_and_names_are_rays() -> None:
    pytest.importorskip("ray")
    from ray._private import ray_constants
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
    from ray.dashboard.modules.job import job_supervisor

    assert JOB_CONFIG == RAY_JOB_CONFIG_JSON_ENV_VAR
    variable, seconds = notices._DRAIN
    assert seconds == getattr(ray_constants, variable)
    variable, seconds = notices._JOB_STOP
    assert seconds == job_supervisor.JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S
    assert f'"{variable}"' in Path(job_supervisor.__file__).read_text()


def trained(directory: Path, notices: dict[str, float], steps: int) -> RunDir:
    """A run with a save at every step; `notices` as its launcher knows them."""
    config = make_config(
        directory,
        train={"max_steps": steps, "global_batch": 4},
        tracking={"console": True},
        checkpoint={"every": 1, "asynchronous": False},
        optim={"schedule": {"type": "constant"}},
    )
    prepared, standing = prepare(config, 1)
    device = torch.device("cpu")
    with alone(device):
        hooks = LauncherHooks(notices=notices)
        work(config, prepared, agree(config, prepared, lambda: standing), device, lambda: None, hooks)
    return prepared.place


def said(place: RunDir) -> list[dict[str, Any]]:
    return [each["fields"] for each in read_events(place.events) if each["event"] == names.NOTICE_SHORT]


def test_a_run_says_once_that_its_saves_take_longer_than_its_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = trained(tmp_path, {"spot": 0.0, "job_stop": 2400.0}, 3)
    (found,) = said(place)
    assert found["step"] == 1 and found["notices"] == {"spot": 0.0}
    saves = [each["fields"] for each in read_events(place.events) if each["event"] == names.SAVED]
    assert len(saves) == 3 and {key: saves[0][key] for key in ("step", "seconds", "bytes")}.items() <= found.items()
    printed = [line for line in capsys.readouterr().out.splitlines() if "a save takes" in line]
    assert len(printed) == 1 and "longer than the 0 s between a spot machine's notice and its end: " in printed[0]
    # The next attempt, or command, does not say it again; of another notice it does.
    trained(tmp_path, {"spot": 0.0, "job_stop": 2400.0}, 4)
    assert len(said(place)) == 1
    trained(tmp_path, {"spot": 0.0, "job_stop": 0.0}, 5)
    assert [each["notices"] for each in said(place)] == [{"spot": 0.0}, {"job_stop": 0.0}]


def test_a_notice_that_one_save_outlasts_leaves_the_others_to_be_said() -> None:
    """Saves of 5 s, then of 200 s: each notice is said once."""
    told: list[Any] = []
    tracker = SimpleNamespace(event=lambda kind, **fields: told.append((kind, fields["step"], fields["notices"])))
    saves = Saves(
        saver=cast(Any, None), tracker=cast(Any, tracker), requests=cast(Any, None), saved=lambda _: None,
        notices={"job_stop": 3.0, "spot": 120.0},
    )  # fmt: skip
    for step, seconds in enumerate((1.0, 5.0, 6.0, 200.0, 300.0), 1):
        saves._compare(Saved(step=step, path="there", seconds=seconds, bytes=1))
    assert told == [("notice_short", 2, {"job_stop": 3.0}), ("notice_short", 4, {"spot": 120.0})]


def test_a_run_whose_notice_is_long_enough_says_nothing(tmp_path: Path) -> None:
    assert not said(trained(tmp_path, {"spot": 120.0, "job_stop": 2400.0}, 2))


def test_every_kind_has_words() -> None:
    every = {"spot": 120, "job_stop": 3.0, "pod": 30.0, "scheduler": 600.0, "ranks": 120}
    line = event_in_words(names.NOTICE_SHORT, {"step": 1, "seconds": 702.4, "bytes": 1, "notices": every})
    assert line.startswith("a save takes 702 s, longer than the 120 s between a spot machine's notice and its end and ")
    for what in ("RAY_JOB_STOP_WAIT_TIME_S", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", STOP_SECONDS):
        assert what in line
    assert "signal without Ray" in line and "\n" not in line
    assert event_in_words(names.NOTICE_SHORT, {}).startswith("a save takes ?")


def test_the_line_is_in_the_table_of_failures() -> None:
    """With what it means and what to do, as whoever reads it looks there."""
    line = event_in_words(names.NOTICE_SHORT, {"step": 1, "seconds": 702.4, "bytes": 1, "notices": {"pod": 30.0}})
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = page.partition("| You read |")[2].partition("\n\n")[0]
    (words,) = re.findall(r"^\| `(a save takes [^`]*)` \|", table, re.MULTILINE)
    assert re.match(re.escape(words).replace("…", ".*"), line)
