"""A run may begin with a checkpoint of another: the weights are those, bit for bit, and nothing else is taken over."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import train
from tests.checkpoints import checkpoints, pieces_of, tensors_in
from tests.loading import CPU, gathered
from tests.ranks import resident_ranks
from tests.runs import LLAMA, make_config, prepare_on_rank0, train_rank, trajectory


def begin(values: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
    """What a run begins with, and where it is after its steps."""
    config = FinetuneConfig.model_validate(values)
    parts = assemble(config, *prepare_on_rank0(config), CPU)
    before = {name: tensor.numpy() for name, tensor in gathered(parts.model).items()}
    return config.model.fill, before, train(parts, stop=lambda: None).step


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three steps on two ranks."""
    directory = tmp_path_factory.mktemp("parent")
    config = make_config(directory, LLAMA, train={"max_steps": 3}, parallel={"precision": "fp32"})
    resident_ranks(train_rank, 2, config.model_dump())
    return directory


@pytest.fixture
def parent(trained: Path, tmp_path: Path) -> CommittedCheckpoint:
    """The checkpoint of that run, in a place where it may be changed."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return checkpoints(tmp_path / "runs" / "run")[-1]


def _config(parent: CommittedCheckpoint, name: str, **model: Any) -> FinetuneConfig:
    home = Path(parent.root).parents[2]
    return make_config(
        home,
        run={"name": name},
        model={"init": "pretrained", "architecture": None, "path": parent.path, **model},
        train={"max_steps": 1},
        optim={"schedule_steps": 3},
        parallel={"precision": "fp32"},
    )


def test_a_run_begins_with_the_weights_of_a_checkpoint(parent: CommittedCheckpoint) -> None:
    expected = {n.removeprefix("model."): t for n, t in tensors_in(parent).items() if n.startswith("model.")}
    for world, fill in ((3, "sharded"), (2, "rank0")):
        config = _config(parent, f"branch-{fill}", fill=fill)
        for mode, found, step in resident_ranks(begin, world, config.model_dump()):
            assert (mode, step) == (fill, 1)
            assert found.keys() == expected.keys()
            assert all(torch.equal(torch.from_numpy(found[name]), expected[name]) for name in expected)


def test_a_run_that_began_with_a_checkpoint_goes_on_without_it(parent: CommittedCheckpoint) -> None:
    """Its own checkpoint has all weights by then; the other may have been deleted as its run went on."""
    config = _config(parent, "branch")
    expected = trajectory(_config(parent, "whole").model_copy(update={"train": _longer(config)}), 2)
    trajectory(config, 2)
    shutil.rmtree(parent.path)
    assert trajectory(config.model_copy(update={"train": _longer(config)}), 2) == expected
    (parent_of_others,) = checkpoints(Path(parent.root).parents[1] / "branch")[-1:]
    assert parent_of_others.step == 3


def _longer(config: FinetuneConfig) -> Any:
    return config.train.model_copy(update={"max_steps": 3})


def _refused(values: Mapping[str, Any]) -> str:
    config = FinetuneConfig.model_validate(values)
    with pytest.raises(ResumeError) as failure:
        assemble(config, *prepare_on_rank0(config), CPU)
    return str(failure.value)


def test_a_damaged_checkpoint_is_no_beginning(parent: CommittedCheckpoint) -> None:
    file = pieces_of(parent)[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    for message in resident_ranks(_refused, 2, _config(parent, "branch").model_dump()):
        assert "model.path=" in message and f"the content of {file.name} is not what was written" in message
