"""Losses of scores are those of a plain loop with transformers' own class, at any world size, packed, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_metrics
from tests.models import save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, largest_difference, make_config, trajectory
from tests.scores import OBJECTIVES, plain_loop, score_config

SLOW = pytest.mark.slow
PLAIN = {"lr": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.0, "warmup_ratio": 0.0, "schedule": {"type": "constant"}}
BOUND = 1e-9


def lines_of(config: FinetuneConfig, kind: str = "step") -> list[dict[str, Any]]:
    found = read_metrics(Path(config.run.storage) / config.run.name / "metrics.jsonl")
    return [line for line in found if line["kind"] == kind]


def named(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {**values, "run": {**values.get("run", {}), "name": name}}


@pytest.mark.parametrize(
    ("name", "packing", "worlds"),
    [
        ("reward centred", "best_fit", (3,)),
        ("classification weighted", "best_fit", (2,)),
        *(pytest.param(name, "best_fit", (1, 2, 3, 5), marks=SLOW) for name in OBJECTIVES),
        *(pytest.param(name, "none", (1, 2, 3), marks=SLOW) for name in OBJECTIVES),
    ],
)
def test_a_plain_loop_and_all_worlds_agree(tmp_path: Path, name: str, packing: str, worlds: tuple[int, ...]) -> None:
    """Of GPT-2, whose head is tied to its embedding until another takes its place."""
    shared: dict[str, Any] = {"data": {"packing": packing}, "optim": PLAIN}
    plain = resident_ranks(
        plain_loop, 1, score_config(tmp_path, OBJECTIVES[name], **named(shared, "plain")).model_dump()
    )
    for world in worlds:
        rows = trajectory(score_config(tmp_path, OBJECTIVES[name], **named(shared, f"w{world}")), world)
        for row, (loss, norm) in zip(rows, plain[0], strict=True):
            assert row["loss"] == pytest.approx(loss, rel=BOUND), (world, row["step"])
            assert row["grad_norm"] == pytest.approx(norm, rel=BOUND), (world, row["step"])
    losses = [loss for loss, _ in plain[0]]
    assert max(losses) - min(losses) > 1e-3, "the comparison means nothing if nothing is learned"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        pytest.param(GPT2, {"type": "full"}, id="gpt2-full"),  # tied
        pytest.param(LLAMA, {"type": "lora", "rank": 2, "alpha": 4}, id="llama-lora"),
        pytest.param(LLAMA, {"type": "full"}, id="llama-full"),
        pytest.param(GPT2, {"type": "lora", "rank": 2, "alpha": 4}, id="gpt2-lora"),
        pytest.param(LLAMA, {"type": "freeze", "trained": ["mlp"]}, id="llama-freeze"),
    ],
)
def test_a_base_that_predicts_tokens_gets_a_head_and_goes_on(
    tmp_path: Path, architecture: dict[str, Any], method: dict[str, Any]
) -> None:
    """From stored weights, read by every rank or by one; stopped and resumed, at another world size too."""
    kind = architecture["model_type"]
    save_checkpoint(
        tmp_path / "model", kind, **{key: value for key, value in architecture.items() if key != "model_type"}
    )
    model = {"path": str(tmp_path / "model"), "init": "pretrained", "architecture": None}
    runs = {}
    for name, fill, worlds, stops in (
        ("whole", "sharded", (2,), ()), ("stopped", "rank0", (2, 2), (2,)), ("moved", "auto", (1, 3), (2,)),
    ):  # fmt: skip
        config = score_config(
            tmp_path, OBJECTIVES["classification"], model={**model, "fill": fill}, method=method, run={"name": name},
            checkpoint={"every": 2}, train={"max_steps": 4},
        )  # fmt: skip
        for world, stop in zip(worlds, (*stops, None), strict=True):
            runs[name] = trajectory(config, world, stop)
    assert runs["stopped"] == runs["whole"] and len(runs["whole"]) == 4
    assert largest_difference(runs["whole"], runs["moved"], "loss") < 1e-8
    assert largest_difference(runs["whole"], runs["moved"], "grad_norm") < 1e-6


def check_documents(config: FinetuneConfig, steps: list[dict[str, Any]]) -> None:
    """The recorded losses of documents, each that of its group, are what the loss is the mean of."""
    (file,) = (Path(config.run.storage) / config.run.name / "documents").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line, step in zip(lines, steps, strict=True):
        assert sum(line["sums"]) / step["target_tokens"] == pytest.approx(step["loss"], rel=1e-5)


@pytest.mark.parametrize("worlds", [(1, 3), pytest.param((1, 2), marks=SLOW)])
@pytest.mark.parametrize(
    ("name", "told", "measured"),
    [
        (
            "classification",
            {"accuracy", "confidence", "second/accuracy", "second/confidence"},
            {"loss", "accuracy", "confidence"},
        ),
        pytest.param(
            "reward centred",
            {"rewards/accuracies", "rewards/margins", "rewards/chosen", "score", "second/rewards/rejected"},
            {"loss", "accuracy", "margins", "rewards_chosen", "rewards_rejected", "score"},
            marks=SLOW,
        ),
        pytest.param("regression", {"mae", "score", "second/mae"}, {"loss", "mae", "score"}, marks=SLOW),
    ],
)
def test_exact_runs_have_the_same_bits_at_any_world(
    tmp_path: Path, name: str, told: set[str], measured: set[str], worlds: tuple[int, int]
) -> None:
    """In fp32, where sums would show their order; with two datasets, and evaluations of rows that were held out."""
    sections: dict[str, Any] = {
        "parallel": {"precision": "fp32"}, "data": {"eval": {"fraction": 0.2}}, "eval": {"every": 3},
        "checkpoint": {"best": "eval/held_out/loss"}, "names": ("first", "second"),
        "tracking": {"documents": True, "console": False, "mlflow": {"enabled": False}},
    }  # fmt: skip
    runs = {}
    for world in worlds:
        exact: dict[str, Any] = {"run": {"name": f"w{world}", "exact": True, "threads": 1}}
        config = score_config(tmp_path, OBJECTIVES[name], **sections, **exact)
        steps = trajectory(config, world)
        check_documents(config, steps)
        beside = [(line["preferences"], line["datasets"]) for line in lines_of(config)]
        runs[world] = (steps, beside, [line["values"] for line in lines_of(config, "eval")])
    assert runs[worlds[0]] == runs[worlds[1]]
    _, beside, evaluations = runs[1]
    assert {key for key, _ in beside[0][0]} >= told and [own for own, *_ in beside[0][1]] == ["first", "second"]
    assert len(evaluations) == 2 and evaluations[0].keys() >= {f"eval/held_out/{each}" for each in measured}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("reward centred", 2), ("classification weighted", 4)])
def test_ranks_that_share_samples_learn_what_one_learns(tmp_path: Path, name: str, world: int) -> None:
    """Pairs are cut between ranks, which put their scores together."""
    runs = {}
    for run, ranks, parallel in (("alone", 1, {}), ("shared", world, {"mesh": {"sequence": 2}})):
        config = score_config(
            tmp_path, OBJECTIVES[name], architecture=LLAMA, train={"max_steps": 3}, run={"name": run},
            parallel={"precision": "fp64", **parallel}, data={"eval": {"fraction": 0.2}},
        )  # fmt: skip
        runs[run] = trajectory(config, ranks), [*lines_of(config), *lines_of(config, "eval")]
    for key in ("loss", "grad_norm"):
        assert largest_difference(runs["alone"][0], runs["shared"][0], key) <= BOUND
    for alone, shared in zip(runs["alone"][1], runs["shared"][1], strict=True):
        for key in {"preferences", "values"} & alone.keys():
            assert dict(shared[key]) == pytest.approx(dict(alone[key]), rel=1e-9)


@pytest.mark.slow
def test_a_run_begins_with_what_another_one_has_learned(tmp_path: Path) -> None:
    """The network of a run that predicts tokens gets a head; that of one with a head goes on with it, if it fits."""
    made = make_config(tmp_path, run={"name": "tokens"}, train={"global_batch": 10, "micro_batch": 2, "max_steps": 2})
    trajectory(made, 1)
    numbers, losses = OBJECTIVES["regression"], dict[str, float]()
    kept: dict[str, Any] = {"checkpoint": {"every": 2}, "train": {"max_steps": 2}}
    for name, before in (("first", "tokens"), ("second", "first")):
        path = {"path": str(tmp_path / "runs" / before / "checkpoints" / "step-00000002.a1"), "architecture": None}
        config = score_config(tmp_path, numbers, model={**path, "init": "pretrained"}, run={"name": name}, **kept)
        losses[name] = trajectory(config, 2)[0]["loss"]
    whole = trajectory(
        score_config(
            tmp_path, numbers, model={**path, "init": "pretrained"}, run={"name": "other"}, optim={"lr": 1e-12}, **kept
        ),
        1,
    )
    assert whole[0]["loss"] == pytest.approx(losses["second"], rel=1e-9) != losses["first"]
    three = {"head": {"type": "score", "labels": ["a", "b", "c"], "pad_token": "w0"}, **path, "init": "pretrained"}
    with pytest.raises(AssertionError, match=r"model\.head\.outputs=3, and the head of model\.path=.* has 1"):
        trajectory(score_config(tmp_path, OBJECTIVES["classification"], model=three, run={"name": "three"}), 1)
