"""Losses of pairs are those of a plain loop, at any world size, packed or not; to the bit, if a run is exact."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_metrics
from tests.preferences import KTO, PAIRS, plain_loop, preference_config
from tests.ranks import resident_ranks
from tests.runs import LLAMA, largest_difference, trajectory

SLOW = pytest.mark.slow
PLAIN = {"lr": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.0, "warmup_ratio": 0.0, "schedule": {"type": "constant"}}
BOUND = 1e-9
EVAL: dict[str, Any] = {"eval": {"fraction": 0.2}}


def lines_of(config: FinetuneConfig, kind: str = "step") -> list[dict[str, Any]]:
    found = read_metrics(Path(config.run.storage) / config.run.name / "metrics.jsonl")
    return [line for line in found if line["kind"] == kind]


def named(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {**values, "run": {**values.get("run", {}), "name": name}}


@pytest.mark.parametrize(
    ("name", "packing", "worlds"),
    [
        # The others differ in a formula alone, which tests/unit/test_preference_loss.py compares.
        ("dpo and sft", "best_fit", (1, 3)),
        *(pytest.param(name, "best_fit", (1, 2, 3, 5), marks=SLOW) for name in PAIRS),
        *(pytest.param(name, "none", (1, 2, 3, 5), marks=SLOW) for name in PAIRS),
    ],
)
def test_a_plain_loop_and_all_worlds_agree(tmp_path: Path, name: str, packing: str, worlds: tuple[int, ...]) -> None:
    shared: dict[str, Any] = {"data": {"packing": packing}, "optim": PLAIN}
    plain = resident_ranks(
        plain_loop, 1, preference_config(tmp_path, PAIRS[name], **named(shared, "plain")).model_dump()
    )
    for world in worlds:
        rows = trajectory(preference_config(tmp_path, PAIRS[name], **named(shared, f"w{world}")), world)
        for row, (loss, norm) in zip(rows, plain[0], strict=True):
            assert row["loss"] == pytest.approx(loss, rel=BOUND), (world, row["step"])
            assert row["grad_norm"] == pytest.approx(norm, rel=BOUND), (world, row["step"])
    assert abs(plain[0][-1][0] - plain[0][0][0]) > 1e-3, "the comparison means nothing if nothing is learned"


@pytest.mark.parametrize("worlds", [(1, 3), pytest.param((1, 2), marks=SLOW)])
def test_exact_runs_have_the_same_bits_at_any_world(tmp_path: Path, worlds: tuple[int, int]) -> None:
    """In fp32, where sums would show their order; with two datasets, and evaluations of rows that were held out."""
    sections: dict[str, Any] = {
        "parallel": {"precision": "fp32"}, "data": EVAL,
        "eval": {"every": 3, "early_stop": {"metric": "eval/held_out/margins", "patience": 3}},
        "checkpoint": {"best": "eval/held_out/accuracy"},
    }  # fmt: skip
    runs = {}
    for world in worlds:
        exact = {"run": {"name": f"w{world}", "exact": True, "threads": 1}}
        config = preference_config(tmp_path, PAIRS["dpo and sft"], names=("first", "second"), **sections, **exact)
        steps = trajectory(config, world)
        beside = [(line["preferences"], line["datasets"]) for line in lines_of(config)]
        runs[world] = (steps, beside, [line["values"] for line in lines_of(config, "eval")])
    assert runs[worlds[0]] == runs[worlds[1]]
    _, beside, evaluations = runs[1]
    told, datasets = beside[0]
    assert {key for key, _ in told} >= {"rewards/accuracies", "rewards/margins", "nll_loss", "second/logps/chosen"}
    assert [name for name, *_ in datasets] == ["first", "second"] and len(evaluations) == 2
    assert evaluations[0].keys() >= {"eval/held_out/loss", "eval/held_out/accuracy", "eval/held_out/margins"}


@pytest.mark.parametrize(
    ("objective", "world", "mesh"),
    [
        pytest.param(PAIRS["dpo and sft"], 2, {"sequence": 2}, marks=SLOW),
        pytest.param(KTO["kto weighted"], 4, {"sequence": 2, "tensor": 2}, marks=SLOW),
        pytest.param(PAIRS["orpo"], 2, {"tensor": 2}, marks=SLOW),
        pytest.param(KTO["kto"], 4, {"sequence": 2}, marks=SLOW),
    ],
)
def test_ranks_that_share_samples_and_layers_learn_what_one_learns(
    tmp_path: Path, objective: dict[str, Any], world: int, mesh: dict[str, int]
) -> None:
    """Pairs are cut between ranks, whose sums of documents are put together."""
    runs = {}
    for name, ranks, parallel in (("alone", 1, {}), ("shared", world, {"mesh": mesh})):
        config = preference_config(
            tmp_path, objective, architecture=LLAMA, train={"max_steps": 3}, run={"name": name},
            parallel={"precision": "fp64", **parallel},
        )  # fmt: skip
        runs[name] = trajectory(config, ranks), [dict(line["preferences"]) for line in lines_of(config)]
    for key, bound in (("loss", 1e-8), ("grad_norm", 1e-6)):
        assert largest_difference(runs["alone"][0], runs["shared"][0], key) <= bound
    for alone, shared in zip(runs["alone"][1], runs["shared"][1], strict=True):
        assert shared == pytest.approx(alone, rel=1e-7)


def measured(values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """What an evaluation measures before training, with the reference and where nobody knows it."""
    from raytune_fsdp.run.assemble import assemble
    from tests.runs import prepare_on_rank0

    config, device = FinetuneConfig.model_validate(values), torch.device("cpu")
    parts = assemble(config, *prepare_on_rank0(config), device)
    with_reference, without = (
        exam.values(
            parts.model, parts.tokenizer, micro_batch=2, layout=parts.plan.layout, device=device, attention="eager"
        )
        for exam in (parts.exam, replace(parts.exam, given=None))
    )
    parts.saves.leave()
    parts.tracker.finish("interrupted")
    return with_reference, without


@pytest.mark.parametrize("objective", [PAIRS["dpo"], KTO["kto"]], ids=["dpo", "kto"])
def test_without_a_reference_log_probabilities_are_all_that_is_measured(
    tmp_path: Path, objective: dict[str, Any]
) -> None:
    """Where it is known, all rewards are 0 before training."""
    config = preference_config(tmp_path, objective, eval={"every": 3}, data=EVAL, train={"max_steps": 3})
    both = resident_ranks(measured, 2, config.model_dump())
    assert both[0] == both[1]
    known, unknown = both[0]
    assert unknown.keys() == {"eval/held_out/logps_chosen", "eval/held_out/logps_rejected"}
    assert unknown.items() <= known.items() and known["eval/held_out/rewards_chosen"] == 0.0
    assert known["eval/held_out/loss"] > 0.4


def test_a_run_is_measured_beside_its_reference_also_where_its_rows_are_elsewhere_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what its ranks have kept of the reference, which is known by what the rows are."""
    make_it = partial(preference_config, tmp_path, PAIRS["dpo"], eval={"every": 3}, train={"max_steps": 3})
    train, shared = make_it().data.train[0].model_dump(), tmp_path / "measured.jsonl"
    shared.write_text("".join(Path(train["path"]).read_text().splitlines(keepends=True)[:12]))
    config = make_it(data={"eval": [{**train, "name": "some", "path": str(shared)}]})
    trajectory(config, 1)
    (line,) = lines_of(config, "eval")
    moved = shared.rename(tmp_path / "moved.jsonl")
    run = str(Path(config.run.storage) / config.run.name)
    capsys.readouterr()
    assert main(["eval", run, "--json", "--data.eval.0.path", str(moved)]) == 0
    said = json.loads(capsys.readouterr().out)
    for key in ("loss", "rewards_chosen", "logps_chosen"):
        name = f"eval/some/{key}"
        assert said[name] == pytest.approx(line["values"][name], rel=1e-6)
