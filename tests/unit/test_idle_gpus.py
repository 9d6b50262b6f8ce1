"""`cluster.device: auto` with fewer GPUs than workers: the run is on CPUs, and says so."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.launch import local
from raytune_fsdp.launch.ray import driver
from raytune_fsdp.launch.ray.resources import Node
from tests.runs import make_config

IDLE = "cluster.device=auto: 3 GPUs for 4 workers, so the run is on CPUs; set cluster.workers=3 to train on the GPUs"


class EnoughError(Exception):
    """Raised where a run would go on."""


def enough(*_: Any, **__: Any) -> Any:
    raise EnoughError


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"workers": 4}, [IDLE]),
        ({"workers": 4, "device": "cpu"}, []),
        ({"workers": 4, "gpus_per_worker": 0}, []),
        ({"workers": 3}, []),
    ],
)
def test_gpus_that_are_too_few_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any], said: list[str]
) -> None:
    found: dict[str, list[str]] = {"without Ray": [], "on Ray": []}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(local, "prepare", enough)
    with pytest.raises(EnoughError):
        local.run(make_config(tmp_path, cluster={"device": "auto", **cluster}), say=found["without Ray"].append)

    node = Node(id="a", name="a", total={"GPU": 3, "CPU": 64}, free={})
    instead = {"nodes": lambda: [node], "may_grow": lambda: False, "check_attention": enough}
    instead["Board"] = lambda: SimpleNamespace(close=lambda seconds: None)
    instead["prepare"] = lambda *_, **__: (None, SimpleNamespace(complete=False))
    for name, function in instead.items():
        monkeypatch.setattr(driver, name, function)
    connecting = Future[Any]()
    connecting.set_result(SimpleNamespace(about="a Ray", head=None))
    signals: Any = SimpleNamespace(take=lambda: None)
    phases: Any = SimpleNamespace(finished=lambda name: None)
    config = make_config(tmp_path, cluster={"device": "auto", "launch": "ray", **cluster})
    with pytest.raises(EnoughError):
        driver.run_on_ray(config, connecting, signals=signals, phases=phases, progress=None, say=found["on Ray"].append)
    assert found == {"without Ray": said, "on Ray": ["Ray: a Ray", *said]}


@pytest.mark.parametrize(
    ("device", "world", "refused"), [("auto", 8, True), ("auto", 4, False), ("cuda", 4, True), ("cpu", 8, False)]
)
def test_under_torchrun_every_rank_has_a_gpu_or_none_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, world: int, refused: bool
) -> None:
    """Ranks on the CPU of one machine would wait for those on the GPUs of another one."""
    for name, number in (("RANK", 1), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(number))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(local, "meet", enough)
    with pytest.raises(ConfigError if refused else EnoughError, match="nproc-per-node=3" if refused else None):
        local.run(make_config(tmp_path, cluster={"device": device}))
