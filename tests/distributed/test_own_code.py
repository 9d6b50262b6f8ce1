"""A loss and a network of the user's own: the same on any number of ranks, continued, exported, loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from tests.runs import GPT2, LLAMA, largest_difference, make_config, trajectory

SLOW = pytest.mark.slow


def config_of(directory: Path, name: str, train: dict[str, Any], **sections: Any) -> FinetuneConfig:
    architecture = sections.pop("architecture", {**GPT2, "resid_pdrop": 0.1})
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": 6, **train}
    return make_config(directory, architecture, run={"name": name, **sections.pop("run", {})}, train=train, **sections)


@pytest.mark.parametrize(
    ("function", "worlds"),
    [
        ("own_losses:by_length", (3,)),
        pytest.param("own_losses:by_length", (2, 4), marks=SLOW),
        pytest.param("own_code:focal", (2, 3, 4), marks=SLOW),
    ],
)
def test_worlds_agree(tmp_path: Path, function: str, worlds: tuple[int, ...]) -> None:
    own = {"loss": f"tests.{function}"}
    alone = trajectory(config_of(tmp_path, "alone", own), 1)
    without = trajectory(config_of(tmp_path, "without", {}), 1)
    assert all(abs(a["loss"] / b["loss"] - 1) > 1e-3 for a, b in zip(alone, without, strict=True)), "it does nothing"
    for world in worlds:
        rows = trajectory(config_of(tmp_path, f"w{world}", own), world)
        assert largest_difference(alone, rows, "loss") < 1e-10
        assert largest_difference(alone, rows, "grad_norm") < 1e-10


@pytest.mark.slow
def test_minus_the_log_probability_is_the_run_without_it(tmp_path: Path) -> None:
    """To the bit, on two ranks, in the head that most runs have."""
    sections: Any = {"model": {"loss": "chunked", "init": "random", "architecture": LLAMA}, "architecture": LLAMA}
    sections["model"]["tokenizer"] = str(tmp_path / "tokenizer")
    found = [
        trajectory(config_of(tmp_path, name, train, parallel={"precision": "fp32"}, **sections), 2)
        for name, train in (("with", {"loss": "tests.own_code:minus"}), ("without", {}))
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_with_exact_sums_worlds_agree_to_the_bit_and_it_goes_on(tmp_path: Path) -> None:
    """In fp32; begun on three ranks and continued on two."""
    sections: Any = {"parallel": {"precision": "fp32"}, "run": {"exact": True, "digest_every": 3}}
    own = {"loss": "tests.own_code:focal"}
    alone = trajectory(config_of(tmp_path, "alone", own, **sections), 1)
    three = config_of(tmp_path, "three", own, checkpoint={"every": 4, "asynchronous": False}, **sections)
    trajectory(three, 3, stop_after=4)
    assert trajectory(three, 2) == alone


@pytest.mark.slow
def test_ranks_that_share_layers_agree(tmp_path: Path) -> None:
    """Each has a part of the vocabulary, and all of every document."""
    own, rows = {"loss": "tests.own_losses:by_length"}, []
    for name, world, mesh in (("alone", 1, {}), ("shared", 2, {"tensor": 2})):
        parallel = {"precision": "fp64", "mesh": mesh}
        rows.append(trajectory(config_of(tmp_path, name, own, architecture=LLAMA, parallel=parallel), world))
    assert largest_difference(*rows, "loss") < 1e-8 and largest_difference(*rows, "grad_norm") < 1e-6


NETWORK = {"network": "tests.own_code:network", "init": "random", "architecture": LLAMA}


def network_config(directory: Path, name: str, **sections: Any) -> FinetuneConfig:
    model = {**NETWORK, "tokenizer": str(directory / "tokenizer"), **sections.pop("model", {})}
    return config_of(directory, name, {}, model=model, architecture=LLAMA, **sections)


def test_a_network_of_ones_own_is_spread_and_goes_on(tmp_path: Path) -> None:
    """On three ranks, layers computed again; stopped, and continued on two."""
    parallel = {"precision": "fp64", "activation_checkpointing": "full"}
    alone = trajectory(network_config(tmp_path, "alone"), 1)
    theirs = trajectory(network_config(tmp_path, "theirs", model={"network": None}), 1)
    assert largest_difference(alone, theirs, "loss") > 1e-4, "it is Llama's"
    three = network_config(tmp_path, "three", parallel=parallel, checkpoint={"every": 4, "asynchronous": False})
    trajectory(three, 3, stop_after=4)
    rows = trajectory(three, 2)
    assert largest_difference(alone, rows, "loss") < 1e-8 and largest_difference(alone, rows, "grad_norm") < 1e-6


@pytest.mark.slow
def test_columns_of_rows_reach_the_loss_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Twice the reward of each row is twice the loss of the first step."""
    found = {}
    for name, factor, world in (("once", 1.0, 1), ("three", 1.0, 3), ("twice", 2.0, 1)):
        directory = tmp_path / name
        config = config_of(directory, name, {"loss": "tests.own_code:rewarded", "loss_columns": ["reward"]})
        tokens = directory / "tokens.jsonl"
        rows = [json.loads(line) for line in tokens.read_text().splitlines()]
        rewards = [{**row, "reward": factor * (1 + number % 3)} for number, row in enumerate(rows)]
        tokens.write_text("".join(json.dumps(row) + "\n" for row in rewards))
        found[name] = trajectory(config, world)
    assert largest_difference(found["once"], found["three"], "loss") < 1e-10
    assert found["twice"][0]["loss"] == pytest.approx(2 * found["once"][0]["loss"], rel=1e-12)
    assert found["twice"][0]["samples"] == found["once"][0]["samples"], "what a loss is told moves no sample"
