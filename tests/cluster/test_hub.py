"""A hub model on two machines with caches of their own, whose ranks are not on the machine that prepares the run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_trajectory
from tests.cluster.network import why_not
from tests.cluster.test_network import FAST, HEAD, OUTSIDE, SECOND, Machines
from tests.models import save_checkpoint
from tests.ray.jobs import ROOT, TRAIN, config_of, events
from tests.runs import trajectory
from tests.unit.fake_hub import TOKEN, Sent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8999
STEPS = {**TRAIN, "max_steps": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of files that are longer than what is read of each for its header; there is another model like it."""
    place = tmp_path_factory.mktemp("hub") / "someone" / "base"
    save_checkpoint(place, "llama", max_shard_size="300KB", hidden_size=96, intermediate_size=384)
    shutil.copytree(place, place.with_name("other"))
    return place


@pytest.fixture(scope="module", params=[3, 0], ids=["head-with-cpus", "head-without-cpus"])
def machines(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    """A head that has no place for a rank, another machine, and the hub outside. Only `ray start` knows the token."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    found = Machines(tmp_path_factory.mktemp("machines"))
    kept = {name: value for name, value in found.environment.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    found.environment = {**kept, "HF_HUB_DISABLE_XET": "1"}
    hub = f"http://{found.network.address(OUTSIDE)}:{PORT}"
    found.of_nodes = {**FAST, "HF_TOKEN": TOKEN, "HF_HOME": str(found.place / "hf"), "HF_ENDPOINT": hub}
    try:
        with open(found.directory / "hub.txt", "w") as log:
            found.network.start(
                OUTSIDE, sys.executable, "-m", "tests.unit.fake_hub", str(base.parents[1]), "0.0.0.0", str(PORT),
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        found.begin(cpus=request.param, seats=0, second=3)
        yield found
    finally:
        found.close()


def sent(log: Path) -> list[Sent]:
    """What the hub has sent of weights, by the addresses of those who asked."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("[")]
    return [each for each in (Sent(*json.loads(line)) for line in lines) if each.file.endswith(".safetensors")]


def on_second(directory: Path, **sections: Any) -> FinetuneConfig:
    """Two ranks, for which the head has no seats."""
    cluster = {
        "launch": "ray", "workers": 2, "device": "cpu", "wait_minutes": 5, "resources_per_worker": {"seat": 1},
        "env": {"GLOO_SOCKET_IFNAME": "eth0"},
    }  # fmt: skip
    return config_of(directory, cluster=cluster, train=STEPS, **sections)


def test_the_machine_of_the_ranks_fetches_and_the_head_does_not(machines: Machines, base: Path, tmp_path: Path) -> None:
    model = {"init": "pretrained", "architecture": None}
    config = on_second(tmp_path, model={**model, "path": "someone/base"})
    said, _ = machines.run(config).communicate(timeout=600)
    assert "fetching the weights of someone/base from the hub" in said, said
    run_dir = Path(config.run.storage) / config.run.name
    here = config_of(tmp_path, model={**model, "path": str(base)}, run={"name": "here"}, train=STEPS)
    assert read_trajectory(run_dir / "metrics.jsonl") == trajectory(here, 2), said
    (joined,) = events(run_dir, "ranks_joined")
    assert len({rank["node_id"] for rank in joined["fields"]["ranks"]}) == 1
    head, second = machines.network.address(HEAD), machines.network.address(SECOND)
    read = sent(machines.directory / "hub.txt")
    files = sorted(f"someone/base/{each.name}" for each in base.glob("*.safetensors"))
    assert sorted(each.file for each in read if each.to == second) == files
    assert all(each.whole for each in read if each.to == second)
    assert sorted({each.file for each in read if each.to == head}) == files, "their headers"
    assert not any(each.whole for each in read if each.to == head)
    assert sum(each.stop - each.start for each in read if each.to == head) < 8e6
    assert TOKEN not in said
    for file in (file for place in (tmp_path, machines.directory) for file in place.rglob("*")):
        if file.is_file() and not file.is_symlink() and "working_dir_files" not in file.parts:  # where these tests are
            assert TOKEN.encode() not in file.read_bytes(), file
    assert not [left for own in machines.own for left in own.rglob(".shared-*")]


def test_where_no_machine_of_ranks_reaches_the_hub_that_is_said_before_one_is_asked_for(
    machines: Machines, tmp_path: Path
) -> None:
    """The head does."""
    machines.network.hide(SECOND, OUTSIDE)
    config = on_second(tmp_path, model={"init": "pretrained", "architecture": None, "path": "someone/other"})
    said, _ = machines.run(config).communicate(timeout=300)
    assert "no node that could hold a rank can have the weights: " in said, said
    assert "model.path=someone/other, on " in said and "the hub cannot be reached" in said
    assert "fetching" not in said and "started on" not in said
    assert not (Path(config.run.storage) / config.run.name).exists()
