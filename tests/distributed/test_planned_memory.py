"""What the planner says of memory and collectives is what real steps of real ranks take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import planned_memory
from benchmarks.planned_memory import CASES, LATER, MIB, agrees, config_of, highest, measured, planned
from tests.ranks import run_ranks

QUICK = ("tiny, alone", "tiny, full_shard")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_take_what_is_planned(tmp_path: Path, name: str) -> None:
    world, architecture, sections = CASES[name]
    if "method" in sections:
        pytest.importorskip("peft")
    config = config_of(tmp_path, architecture, sections, world)
    said = planned(config, world)
    found = run_ranks(measured, world, config.model_dump(exclude_unset=True), seconds=600)[0]
    assert found["between_steps"] == said["between_steps"]
    assert found["collectives"] == said["collectives"]
    assert found["tensors"] <= found["raw"]
    slack = MIB if name in QUICK else planned_memory.SLACK
    assert agrees(said, found, slack), (said["peak"] / MIB, found["tensors"] / MIB)


def test_the_cases_vary() -> None:
    parallel = [sections["parallel"] for _, _, sections in CASES.values()]
    assert {world for world, _, _ in CASES.values()} >= {1, 2, 4}
    assert {each.get("mesh", {}).get("sequence", 1) for each in parallel} >= {1, 2, 4}
    assert {each.get("strategy", "full_shard") for each in parallel} == {
        "full_shard", "shard_grad_op", "replicate", "hybrid_shard",
    }  # fmt: skip
    assert {each.get("activation_checkpointing", "none") for each in parallel} >= {"none", "selective", "full"}
    assert set(LATER) <= CASES.keys()


def event(at: int, size: int, pointer: int, operator: Any) -> Any:
    return planned_memory._Event(at, size, pointer, operator)


def operator(number: int, name: str, *children: Any) -> Any:
    return SimpleNamespace(id=number, name=name, children=children, tag=None)


def test_only_what_is_inside_one_operator_is_left_out() -> None:
    """A kernel's own buffer; not a tensor that is freed later, nor what an operator has through another one."""
    product, other, annotated = operator(1, "aten::mm"), operator(2, "aten::add"), operator(3, "FSDP::gather")
    inside = [event(0, 100, 7, product), event(1, -100, 7, product)]
    across = [event(0, 100, 7, product), event(1, -100, 7, other)]
    gathered = [event(0, 100, 7, annotated), event(1, -100, 7, annotated)]
    assert [highest(each, scratch=False) for each in (inside, across, gathered)] == [0, 100, 100]
    assert highest(inside, scratch=True) == 100
    result = event(0, 10, 8, product)
    assert highest([result, *inside], scratch=False) == 10
