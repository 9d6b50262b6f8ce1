"""How many ranks an attempt gets, and when a run makes way for a larger one. No Ray is started."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray import sizes
from raytune_fsdp.launch.ray.board import Joined
from raytune_fsdp.launch.ray.resources import Node, Request
from raytune_fsdp.launch.ray.sizes import Sizes
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(sizes, "time", found)
    return found


def asked(placement: str = "pack", **per_worker: float) -> Request:
    return Request(
        workers=8, per_worker={"CPU": 1.0, **per_worker}, accelerator_type=None, placement=placement, device="cpu"
    )


def node(name: str, cpus: float, free: float | None = None) -> Node:
    return Node(id=name, name=name, total={"CPU": cpus}, free={"CPU": cpus if free is None else free})


def size(found: Request | None) -> int | None:
    return None if found is None else found.workers


def test_a_fixed_number_is_asked_for_whatever_there_is(clock: Clock) -> None:
    assert size(Sizes(asked(), [4]).next(list)) == 4


@pytest.mark.parametrize(
    ("placement", "nodes", "expected"),
    [
        ("pack", [node("a", 5), node("b", 4)], 8),
        ("pack", [node("a", 5), node("b", 3)], 6),  # seven, and one CPU is left for the data; but seven is no size
        ("pack", [node("a", 5, free=2), node("b", 3)], 4),
        ("pack", [node("a", 2)], None),  # the data needs the second CPU
        ("strict_pack", [node("a", 5), node("b", 4)], 4),
        ("strict_spread", [node("a", 5), node("b", 4), node("c", 1)], 2),
    ],
)
def test_the_largest_size_that_there_is_room_for(
    clock: Clock, placement: str, nodes: list[Node], expected: int | None
) -> None:
    known = Sizes(asked(placement), [2, 4, 6, 8])
    clock.now = 100.0
    assert size(known.next(lambda: nodes)) == expected


def test_what_the_last_ranks_had_may_come_back_for_a_moment(clock: Clock) -> None:
    """Ray says a second late what is free: a crash of one rank of four must not make it three."""
    known = Sizes(asked(), [1, 2, 3, 4])
    known.began(4)
    clock.now = 60.0
    known.ended()
    assert known.next(lambda: [node("a", 5, free=4)]) is None
    assert size(known.next(lambda: [node("a", 5)])) == 4
    clock.now += sizes._RETURN_SECONDS
    assert size(known.next(lambda: [node("a", 5, free=4)])) == 3


def test_a_run_grows_once_the_cluster_has_settled(clock: Clock) -> None:
    known = Sizes(asked(), [1, 2, 4])
    ranks = {rank: Joined(rank, "a", "a", 7) for rank in range(2)}
    small, one, two = node("a", 3, free=1), node("b", 1), node("c", 1)
    assert known.growth(lambda: [small], ranks) is None
    clock.now = 10
    assert known.growth(lambda: [small], ranks) is None, "as many as now"
    assert known.growth(lambda: [small, one], ranks) is None, "three is no size"
    assert known.growth(lambda: [small, one, two], ranks) is None, "it has come just now"
    clock.now += sizes._SETTLED_SECONDS
    others = node("c", 1, free=0)
    assert known.growth(lambda: [small, one, others], ranks) is None, "another job has it"
    assert known.growth(lambda: [small, one, two], ranks) == 4


def test_resources_of_our_own_count_as_free(clock: Clock) -> None:
    known = Sizes(asked(GPU=1.0), [1, 2, 4])
    ranks = {0: Joined(0, "a", "a", 7)}

    def gpus(name: str, free: float) -> Node:
        return Node(id=name, name=name, total={"CPU": 8.0, "GPU": 1.0}, free={"CPU": 4.0, "GPU": free})

    nodes: list[Any] = [gpus("a", 0.0), gpus("b", 1.0)]
    assert known.growth(lambda: nodes, ranks) is None
    clock.now = 10
    assert known.growth(lambda: nodes, ranks) == 2
