"""KTO: its KL is that of the whole global batch, so the loss depends on neither ranks, micro-batches nor packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_preference import BOUND, EVAL, PLAIN, SLOW, lines_of, named
from tests.preferences import KTO, plain_loop, preference_config
from tests.ranks import resident_ranks
from tests.runs import largest_difference, trajectory


@pytest.mark.parametrize(
    ("name", "packing", "worlds"),
    [
        ("kto weighted", "best_fit", (3,)),
        *(pytest.param(name, packing, (1, 2, 3, 5), marks=SLOW) for name in KTO for packing in ("best_fit", "none")),
    ],
)
def test_a_plain_loop_and_all_worlds_agree(tmp_path: Path, name: str, packing: str, worlds: tuple[int, ...]) -> None:
    shared: dict[str, Any] = {"data": {"packing": packing}, "optim": PLAIN}
    values = preference_config(tmp_path, KTO[name], **named(shared, "plain")).model_dump()
    (plain,) = resident_ranks(plain_loop, 1, values)
    for world in worlds:
        config = preference_config(tmp_path, KTO[name], **named(shared, f"w{world}"))
        for row, (loss, norm) in zip(trajectory(config, world), plain, strict=True):
            assert row["loss"] == pytest.approx(loss, rel=BOUND), (world, row["step"])
            assert row["grad_norm"] == pytest.approx(norm, rel=BOUND), (world, row["step"])
        told = dict(lines_of(config)[-1]["preferences"])
        assert told["kl"] > 0.1 and {"rewards/chosen", "rewards/rejected", "rewards/margins"} <= told.keys()
        assert "rewards/accuracies" not in told


@pytest.mark.slow
def test_exact_runs_have_the_same_bits_at_any_world(tmp_path: Path) -> None:
    """At any world; with weights by a count of the data, and an evaluation."""
    sections: dict[str, Any] = {
        "parallel": {"precision": "fp32"}, "eval": {"every": 6}, "data": EVAL,
    }  # fmt: skip
    objective, runs = {**KTO["kto"], "desirable_weight": "auto", "undesirable_weight": 0.5}, {}
    for world in (1, 2, 3):
        exact = {"run": {"name": f"w{world}", "exact": True, "threads": 1}}
        config = preference_config(tmp_path, objective, **sections, **exact)
        steps = trajectory(config, world)
        runs[world] = (steps, [line["preferences"] for line in lines_of(config)], lines_of(config, "eval")[0]["values"])
    assert runs[1] == runs[2] == runs[3]
    assert runs[1][2].keys() >= {"eval/held_out/loss", "eval/held_out/kl", "eval/held_out/rewards_chosen"}


@pytest.mark.slow
def test_a_reference_that_is_asked_in_every_step_says_the_same(tmp_path: Path) -> None:
    """On three ranks, which have fillers in every step, and ask it once for both passes; with an evaluation."""
    runs = []
    for world, when in ((1, "before"), (3, "during")):
        config = preference_config(
            tmp_path, KTO["kto weighted"], run={"name": when}, reference={"when": when}, train={"max_steps": 3},
            eval={"every": 3}, data=EVAL,
        )  # fmt: skip
        runs.append((trajectory(config, world), lines_of(config, "eval")[0]["values"]))
    (before, measured), (during, again) = runs
    assert (
        largest_difference(before, during, "loss") < BOUND and largest_difference(before, during, "grad_norm") < BOUND
    )
    assert again == pytest.approx(measured, rel=BOUND, abs=1e-9) and measured["eval/held_out/rewards_chosen"]
