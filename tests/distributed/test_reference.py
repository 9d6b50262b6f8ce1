"""What a reference says: computed once, before training, whatever happens meanwhile, and refused if it is another's."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.reference import REFERENCE
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from tests.ranks import run_ranks
from tests.runs import GPT2, make_config, train_rank, trajectory

LN2 = math.log(2)


def write_pairs(path: Path, rows: int = 40, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join(f"w{number}" for number in rng.integers(3, 64, int(rng.integers(2, most))))

    with open(path, "w") as file:
        for _ in range(rows):
            file.write(json.dumps({"prompt": words(6), "chosen": f" {words(9)}", "rejected": f" {words(9)}"}) + "\n")
    return path


def pairs(directory: Path, objective: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]) -> FinetuneConfig:
    """A run of eight steps over five windows of pairs."""
    path = directory / "pairs.jsonl"
    directory.mkdir(exist_ok=True)
    if not path.exists():
        write_pairs(path)
    format = {"type": "preference", "style": "plain"}
    train = {"global_batch": 4, "micro_batch": 2, "max_steps": 8, "objective": objective or {"type": "dpo"}}
    data = {"train": [{"path": str(path), "format": format}], "window": 8}
    sections = {
        "train": {**train, **sections.pop("train", {})},
        "data": {**data, **sections.pop("data", {})},
        **sections,
    }
    return make_config(directory, GPT2, **sections)


def files_of(config: FinetuneConfig) -> list[Path]:
    return sorted(Path(config.run.storage, "cache", REFERENCE).glob("*/*.values"))


def run_of(config: FinetuneConfig) -> Path:
    return Path(config.run.storage, config.run.name)


def values_of(config: FinetuneConfig) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files_of(config)}


def close(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> float:
    assert [row["samples"] for row in left] == [row["samples"] for row in right]
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(left, right, strict=True))


def test_the_first_loss_is_the_logarithm_of_two_and_all_runs_share_the_files(tmp_path: Path) -> None:
    config = pairs(tmp_path)
    steps = trajectory(config, 2)
    assert abs(steps[0]["loss"] - LN2) < 1e-12 and len({row["loss"] for row in steps}) == 8
    before = values_of(config)
    assert len(before) == len({key.split("/")[0] for key in before}) * 5
    again = pairs(tmp_path, run={"name": "again"}, train={"global_batch": 2, "max_steps": 4})
    assert abs(trajectory(again, 3)[0]["loss"] - LN2) < 1e-12
    assert values_of(config) == before
    told = [event["fields"] for event in read_events(run_of(again) / "events.jsonl") if event["event"] == "reference"]
    assert [each["computed"] for each in told] == [0] and told[0]["documents"] == 80


def test_values_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    found = []
    for world in (1, 2, 3):
        config = pairs(tmp_path / f"on-{world}")
        found.append((values_of_run(config, world), read_trajectory(run_of(config) / "metrics.jsonl")))
    assert found[0][0] == found[1][0] == found[2][0]
    assert close(found[0][1], found[1][1]) < 1e-10 and close(found[0][1], found[2][1]) < 1e-10


def values_of_run(config: FinetuneConfig, world: int) -> dict[str, bytes]:
    trajectory(config, world)
    return values_of(config)


def killed_rank(values: Mapping[str, Any], rank: int, writes: int, step: int) -> None:
    """One rank, of which one is killed: before a file of the reference is in its place, or where a step begins."""
    import torch.distributed as dist

    from raytune_fsdp.data import reference
    from raytune_fsdp.run import loop

    count = {"writes": 0}
    put, take = reference.replace_at_once, loop.train_step

    def writes_then_dies(path: Path, *parts: Any, **options: Any) -> None:
        count["writes"] += path.suffix == ".values"
        if count["writes"] > writes and dist.get_rank() == rank:
            path.with_name("half").write_bytes(b"".join(map(bytes, parts))[:40])
            os.kill(os.getpid(), signal.SIGKILL)
        put(path, *parts, **options)

    def trains_then_dies(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == rank and args[3].step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*args, **options)

    reference.replace_at_once, loop.train_step = writes_then_dies, trains_then_dies
    train_rank(values)


def test_ten_kills_in_the_pass_and_in_training_change_nothing(tmp_path: Path) -> None:
    whole = pairs(tmp_path / "whole", checkpoint={"every": 2})
    wanted = trajectory(whole, 2)
    config = pairs(tmp_path / "killed", checkpoint={"every": 2})
    chance = random.Random(21)
    for kill in range(10):
        world = chance.choice((1, 2, 3))
        writes, step = (chance.randrange(2), 0) if kill < 5 else (99, chance.randrange(1, 9))
        rank = 0 if kill < 5 else chance.randrange(world)
        try:
            run_ranks(killed_rank, world, config.model_dump(), rank, writes, step)
        except AssertionError:
            pass
    found = trajectory(config, 2)
    kept = values_of(config)
    assert {key.split("/")[1]: value for key, value in kept.items()}.keys() == {
        key.split("/")[1] for key in values_of(whole)
    }
    assert kept == values_of(whole), "the same reference has the same place and the same values"
    assert close(wanted, found) < 1e-10


@pytest.mark.parametrize("harm", ["lost", "damaged", "swapped", "half"])
def test_a_file_that_is_not_what_it_was_is_computed_anew_before_a_step_uses_it(tmp_path: Path, harm: str) -> None:
    whole = trajectory(pairs(tmp_path / "whole"), 1)
    config = pairs(tmp_path / "harmed")
    assert len(trajectory(config, 1, stop_after=3)) == 3
    first, second = files_of(config)[:2]
    content = second.read_bytes()
    if harm == "lost":
        shutil.rmtree(first.parent)
    elif harm == "damaged":
        second.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])
    elif harm == "swapped":
        second.write_bytes(first.read_bytes())
    else:
        second.write_bytes(content[: len(content) // 2])
    assert close(whole, trajectory(config, 1)) == 0.0
    assert second.read_bytes() == content
    told = [event["fields"] for event in read_events(run_of(config) / "events.jsonl") if event["event"] == "reference"]
    assert [each["computed"] for each in told] == [4, 5 if harm == "lost" else 1] or told[0]["computed"] == 5


def test_a_longer_run_computes_what_it_reads_more(tmp_path: Path) -> None:
    long = trajectory(pairs(tmp_path / "long"), 1)
    config = pairs(tmp_path / "short", train={"max_steps": 2}, optim={"schedule": {"type": "constant"}})
    trajectory(config, 1)
    few = len(files_of(config))
    assert few < 5
    longer = pairs(tmp_path / "short", train={"max_steps": 8}, optim={"schedule": {"type": "constant"}})
    assert len(trajectory(longer, 1)) == len(long)
    assert len(files_of(config)) > few


def test_other_values_are_refused_by_name(tmp_path: Path) -> None:
    """As another kind of device would compute them, once the files are lost."""
    from raytune_fsdp.data.reference import ReferenceFiles

    config = pairs(tmp_path)
    trajectory(config, 1, stop_after=3)
    directory = files_of(config)[0].parent
    for path in directory.glob("*.values"):
        epoch, window = int(path.name[1:4]), int(path.name[6:14])
        own = ReferenceFiles(root=directory.parent.parent, key=directory.name, about={})
        found = own.read(epoch, window)
        assert found is not None
        own.write(epoch, window, found[0], found[1] + 1e-9)
    with pytest.raises(ResumeError, match="are not those that this run began with"):
        trajectory(config, 1)
