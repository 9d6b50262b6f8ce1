"""finetune() from Python, in a process that is connected to Ray already."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from raytune_fsdp import finetune
from raytune_fsdp.base.errors import Interrupted, RaytuneError, TrainingError
from raytune_fsdp.config import ClusterConfig, FinetuneConfig
from raytune_fsdp.launch.ray.driver import trainer_for
from raytune_fsdp.launch.ray.resources import Request
from raytune_fsdp.record.jsonl import read_trajectory
from tests.ray.jobs import config_of, events
from tests.runs import trajectory

CONNECTED = pytest.mark.usefixtures("cluster")


@pytest.mark.slow
@CONNECTED
def test_three_ranks_and_a_census_on_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks that do not divide by the ranks, a last step that is short, and a run that is complete already."""
    sections = {"data": {"train": config_of(tmp_path).model_dump()["data"]["train"], "seq_len": 48, "window": 10}}
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": None, "epochs": 1.5}
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=train, **sections), 3)
    ray_config = {"launch": "ray", "workers": 3, "device": "cpu"}
    config = config_of(
        tmp_path,
        train=train,
        cluster=ray_config,
        data={**sections["data"], "cache": {"path": str(tmp_path / "other")}},
        export={"at_end": False, "every": 4},
    )
    result = finetune(config)
    assert read_trajectory(result.run_dir / "metrics.jsonl") == whole
    assert result.trained == result.steps == len(whole)
    exported = [line["fields"] for line in events(result.run_dir, "exported")]
    assert [each["step"] for each in exported] == list(range(4, result.steps + 1, 4)), "while training went on"
    assert all((Path(each["path"]) / "model.safetensors").is_file() for each in exported)
    said = capsys.readouterr().out
    assert "Ray: connected already, 4 CPUs" in said and "first step after" in said
    shutil.rmtree(exported[-1]["path"])
    assert finetune(config).trained == 0
    assert (Path(exported[-1]["path"]) / "model.safetensors").is_file(), "made up for"
    assert ray.is_initialized(), "it was not ours to close"
    assert logging.getLogger("ray.train").level == logging.ERROR


def living() -> dict[str, dict[str, Any]]:
    """The actors of this Ray, by id."""
    from ray._private import state

    return {name: actor for name, actor in state.actors().items() if actor["State"] == "ALIVE"}


def started_since(before: Mapping[str, Any]) -> list[str]:
    """The classes of actors that are there since. Two serve all that Ray Data does in this Ray, and stay with it."""
    classes = [actor["ActorClassName"] for name, actor in living().items() if name not in before]
    return [each for each in classes if each not in ("_AutoscalingCoordinatorActor", "_StatsActor")]


def at_step(config: FinetuneConfig, step: int, blow: Callable[[], None]) -> threading.Thread:
    """Does it, in another thread, once the run has reached this step."""
    metrics = Path(config.run.storage) / config.run.name / "metrics.jsonl"

    def watch() -> None:
        deadline = time.monotonic() + 400
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        blow()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
@CONNECTED
def test_a_caller_keeps_its_ray_and_all_that_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether the wait for resources ends, outside of the main thread, or a second Ctrl-C ends the run."""

    @ray.remote(num_cpus=0)
    class Own:
        def answer(self) -> int:
            return 42

    own = Own.remote()
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    assert ray.get([own.answer.remote(), group.ready()])[0] == 42
    before, variables = living(), dict(os.environ)
    handlers = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    raised: list[RaytuneError] = []

    def wait_in_vain() -> None:
        cluster = {"launch": "ray", "workers": 3, "device": "cpu", "wait_minutes": 0.3}
        try:
            finetune(config_of(tmp_path, run={"name": "waiting"}, cluster=cluster))
        except RaytuneError as error:
            raised.append(error)

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    thread.join()
    assert "cluster.wait_minutes=0.3" in str(raised[0]) and isinstance(raised[0], TrainingError)
    assert "the workers did not start in that time; waiting for 3 workers with 1 CPU each" in str(raised[0])

    alike = []

    def twice() -> None:
        alike.append(ray.util.placement_group([{"CPU": 1}]))  # as that of the run's worker, by the same job
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)

    config = config_of(
        tmp_path,
        run={"name": "stopped"},
        train={"global_batch": 10, "micro_batch": 2, "max_steps": 100_000},
        checkpoint={"every": 100_000},
        cluster={"launch": "ray", "workers": 1, "device": "cpu"},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    thread = at_step(config, 3, lambda: stop_writing(config, twice))
    with pytest.raises(Interrupted, match="stopped without another checkpoint"):
        finetune(config)
    thread.join()
    said = capsys.readouterr().out
    assert "stopping: a checkpoint is committed after the current step (again to stop at once)" in said
    assert ray.get(own.answer.remote()) == 42
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    deadline = time.monotonic() + 15
    while (left := started_since(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    assert dict(os.environ) == variables
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert ray.util.placement_group_table(alike[0])["state"] != "REMOVED"
    for each in (group, *alike):
        ray.util.remove_placement_group(each)


@pytest.mark.slow
@CONNECTED
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("_Board", "the message board between the driver and the ranks died"),
        ("TrainController", "Ray Train's controller died"),
        ("SplitCoordinator", "the process that hands out the data died"),
    ],
)
def test_whatever_dies_is_named_and_the_run_goes_on(
    tmp_path: Path, kind: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the ranks themselves are well."""
    config = config_of(
        tmp_path,
        train={"global_batch": 10, "micro_batch": 2, "max_steps": 40},
        cluster={"launch": "ray", "workers": 2, "device": "cpu"},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=config.train.model_dump()), 2)

    def blow() -> None:
        (actor,) = [each for each in living().values() if each["ActorClassName"] == kind]
        os.kill(actor["Pid"], signal.SIGKILL)

    before = living()
    thread = at_step(config, 8, blow)
    finetune(config)
    thread.join()
    place = Path(config.run.storage) / "run"
    (failed,) = events(place, "attempt_failed")
    assert words in failed["fields"]["cause"] and failed["fields"]["last_step"] >= 4
    assert read_trajectory(place / "metrics.jsonl") == whole
    said = capsys.readouterr().out
    assert said.count("the run goes on from there") == 1
    assert "\nfailed\n" not in said and said.count("loss, steps") == 1, said
    deadline = time.monotonic() + 15
    while (left := started_since(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def stop_writing(config: FinetuneConfig, then: Callable[[], None]) -> None:
    """Stop rank 0 in its tracks first, so that the first Ctrl-C does not end the run."""
    (worker,) = [actor for actor in living().values() if actor["ActorClassName"] == "RayTrainWorker"]
    os.kill(worker["Pid"], signal.SIGSTOP)
    then()


@pytest.mark.parametrize(("device", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_backend_is_that_of_the_device(tmp_path: Path, device: str, backend: str) -> None:
    """Also where a GPU is reserved that is not used."""
    asked = Request(workers=2, per_worker={"CPU": 1, "GPU": 1}, accelerator_type=None, placement="pack", device=device)  # type: ignore[arg-type]
    config = config_of(tmp_path, cluster={"launch": "ray", "max_failures": 7, "env": {"NCCL_DEBUG": "INFO"}})
    trainer = trainer_for(lambda: None, None, asked, config)
    assert trainer.backend_config.backend == backend
    assert trainer.scaling_config.num_workers == 2
    assert trainer.run_config.failure_config.max_failures == 0
    assert trainer.run_config.worker_runtime_env == {"env_vars": {"NCCL_DEBUG": "INFO"}}
    assert ClusterConfig().max_failures == 3
