"""finetune() from Python, in a process that is connected to Ray already."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import ray

from raytune_fsdp import finetune
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.ray.driver import trainer_for
from raytune_fsdp.launch.ray.resources import Request
from raytune_fsdp.tracking.jsonl import read_trajectory
from tests.ray.jobs import config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.usefixtures("cluster")


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


@pytest.mark.parametrize(("device", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_backend_is_that_of_the_device(tmp_path: Path, device: str, backend: str) -> None:
    """Also where a GPU is reserved that is not used."""
    asked = Request(workers=2, per_worker={"CPU": 1, "GPU": 1}, accelerator_type=None, placement="pack", device=device)  # type: ignore[arg-type]
    config = config_of(tmp_path, cluster={"launch": "ray", "max_failures": 7, "env": {"NCCL_DEBUG": "INFO"}})
    trainer = trainer_for(lambda: None, None, asked, config, 7)
    assert trainer.backend_config.backend == backend
    assert trainer.scaling_config.num_workers == 2
    assert trainer.run_config.failure_config.max_failures == 7
    assert trainer.run_config.worker_runtime_env == {"env_vars": {"NCCL_DEBUG": "INFO"}}
    assert ClusterConfig().max_failures == 3
