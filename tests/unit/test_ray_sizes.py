"""How many ranks an attempt gets, and when a run makes way for a larger one. No Ray is started."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError

from raytune_fsdp.launch.ray import driver
from raytune_fsdp.launch.ray.attempt import RayAttempt
from raytune_fsdp.launch.ray.attempts import Attempts
from raytune_fsdp.launch.ray.board import Joined
from raytune_fsdp.launch.ray.nodes import growth, sizes
from raytune_fsdp.launch.ray.nodes.sizes import Sizes
from raytune_fsdp.launch.ray.rank import RankJob
from raytune_fsdp.launch.ray.resources import Node, Request
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.screen_messages import Looks
from tests.clock import Clock
from tests.runs import make_config
from tests.unit.test_ray_demand import Groups


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(sizes, "time", found)
    monkeypatch.setattr(growth, "time", found)
    return found


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch, growth)


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


def test_what_does_not_come_is_not_asked_for_again_and_again(clock: Clock, groups: Groups) -> None:
    """Ray says that there is room for four, and does not place them: a hung node, say."""
    known = Sizes(asked(), [1, 2, 4, 5])
    here = [node("a", 3), node("b", 2)]

    def ask() -> int | None:
        found = size(known.next(lambda: here))
        if found is not None:
            known.began(found)
        return found

    sizes_asked = []
    for _ in range(4):
        clock.now += 60
        sizes_asked.append(ask())
        known.did_not_come(sizes_asked[-1] or 0)
    assert sizes_asked == [4, 2, 1, 4], "after the smallest, all are tried again"
    clock.now += 60
    assert ask() == 2
    ranks = {rank: Joined(rank, "a", "a", 7) for rank in range(2)}
    here[0] = node("a", 3, free=1)
    for _ in range(3):
        clock.now += 60
        assert known.growth(lambda: here, ranks) is None, "it would make way for four that do not come"
    here.append(node("c", 1))
    assert known.growth(lambda: here, ranks) is None, "it has come just now"
    clock.now += sizes._SETTLED_SECONDS
    assert known.growth(lambda: here, ranks) is None
    groups.live[0].state = "CREATED"
    assert known.growth(lambda: here, ranks) == 5


@pytest.mark.parametrize("change", ["a node is lost and replaced", "another job takes a place and gives it back"])
def test_what_did_not_come_is_asked_for_again_in_another_cluster(clock: Clock, change: str) -> None:
    known = Sizes(asked(), [2, 3, 4])
    whole = [node("a", 3), node("b", 2)]
    clock.now = 60.0
    assert size(known.next(lambda: whole)) == 4
    known.did_not_come(4)
    clock.now += 60
    less = whole[:1] if change.startswith("a node") else [node("a", 3), node("b", 2, free=1)]
    assert size(known.next(lambda: less)) == (2 if change.startswith("a node") else 3)
    clock.now += 60
    assert size(known.next(lambda: whole)) == 4


def test_a_run_grows_once_the_cluster_has_settled(clock: Clock, groups: Groups) -> None:
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
    assert known.growth(lambda: [small, one, two], ranks) is None
    assert [len(group.bundles) for group in groups.live] == [2], "what would be added is asked for first"
    clock.now += 1
    assert known.growth(lambda: [small, one, two], ranks) is None, "and it is not there yet"
    groups.live[0].state = "CREATED"
    assert known.growth(lambda: [small, one, two], ranks) == 4
    clock.now += growth._STANDS_SECONDS - 1
    known.growing.look()
    assert len(groups.live) == 1, "nobody takes it while the attempt makes way"
    known.ended()
    assert known.next(lambda: [small, one, others]) is None
    assert not groups.live, "now it is for the next attempt, and free in a second"
    assert size(known.next(lambda: [node("a", 3), one, two])) == 4


def test_room_that_others_need_again_is_given_back(clock: Clock, groups: Groups) -> None:
    known = Sizes(asked(), [1, 2])
    ranks, nodes = {0: Joined(0, "a", "a", 7)}, [node("a", 3, free=2)]
    known.growth(lambda: nodes, ranks)
    clock.now = 10.0
    known.growth(lambda: nodes, ranks)
    assert groups.live
    clock.now += growth._STANDS_SECONDS + 1
    known.growing.look()
    assert known.growth(lambda: nodes, ranks) is None
    assert not groups.live, "it did not come: the next try is later"
    clock.now += growth._FIRST_PAUSE - 1
    known.growth(lambda: nodes, ranks)
    assert not groups.live
    clock.now += 1
    known.growth(lambda: nodes, ranks)
    groups.live[0].state = "CREATED"
    assert known.growth(lambda: nodes, ranks) == 2
    clock.now += growth._STANDS_SECONDS
    known.growing.look()
    assert not groups.live, "an attempt that takes long to save keeps nobody waiting"


def hour(
    clock: Clock, groups: Groups, *, made: bool, save_seconds: float, others: bool = True
) -> tuple[Sizes, list[float], list[int]]:
    """An hour of a run, as the driver follows it: when groups were asked for, and the sizes that it made way for one
    after another. `made`: whether groups are. `others`: they take what is not kept from them."""
    known, asked_at, begun = Sizes(asked(), [1, 2]), list[float](), list[int]()
    ranks, nodes, next_look = {0: Joined(0, "a", "a", 7)}, [node("a", 3, free=2)], 0.0
    while clock.now < 3600 and len(ranks) < 2:
        known.growing.look()
        if clock.now >= next_look:
            next_look = clock.now + 1.0
            before = len(groups.live)
            if known.growth(lambda: nodes, ranks) is not None:
                saved_at = clock.now + save_seconds
                while clock.now < saved_at:
                    clock.now += 0.5
                    known.growing.look()
                size = 2 if groups.live or not others else 1
                known.ended()
                known.growing.let_go()
                clock.now += 20
                known.began(size)
                begun.append(size)
                ranks = {rank: Joined(rank, "a", "a", 7) for rank in range(size)}
            asked_at += [clock.now] * (len(groups.live) > before)
            for group in groups.live:
                group.state = "CREATED" if made else "PENDING"
        clock.now += 0.505
    return known, asked_at, begun


def test_groups_that_are_never_made_are_asked_for_less_and_less(clock: Clock, groups: Groups) -> None:
    """Ray says that there is room, and does not place them."""
    _, asked_at, _ = hour(clock, groups, made=False, save_seconds=0)
    pauses = [round(later - first - growth._STANDS_SECONDS, -1) for first, later in pairwise(asked_at)]
    assert pauses == [120, 240, 480, 960]


def test_a_save_that_takes_longer_than_room_is_kept_does_not_make_a_run_grow_in_vain_again_and_again(
    clock: Clock, groups: Groups
) -> None:
    """The size never came, however long ago that was decided. The next time the room is kept as long as it takes."""
    known, _, begun = hour(clock, groups, made=True, save_seconds=130.0)
    assert begun == [1, 2] and known.growing._pause == growth._FIRST_PAUSE


def test_room_is_kept_from_others_for_ten_minutes_at_most(clock: Clock, groups: Groups) -> None:
    known, _, begun = hour(clock, groups, made=True, save_seconds=700.0)
    assert begun == [1] * 4 and known.growing._pause == 8 * growth._FIRST_PAUSE
    assert known.growing._stands_seconds == growth._STANDS_AT_MOST_SECONDS


def test_a_larger_size_has_two_minutes_from_its_own_beginning(clock: Clock, groups: Groups) -> None:
    """And not from the decision to make way for it."""
    known, _, begun = hour(clock, groups, made=True, save_seconds=130.0, others=False)
    assert begun == [2]
    clock.now += growth._LASTS_SECONDS - 1
    known.began(1)
    assert known.growing._pause == growth._FIRST_PAUSE, "it did not last"


@pytest.mark.parametrize("taken_back", [True, False])
def test_others_that_are_busy_and_idle_in_turn_do_not_stop_the_training(
    clock: Clock, groups: Groups, taken_back: bool
) -> None:
    """For half a minute they have two of four CPUs, and for three seconds not. They queue: what a group gives back is
    theirs first, if they are there (`taken_back`)."""
    known, restart, trained, sizes_begun = Sizes(asked(), [2, 4]), 20, 0, list[int]()
    ranks = {rank: Joined(rank, "a", "a", 7) for rank in range(2)}
    while clock.now < 3600:
        idle = clock.now % 33 >= 30
        free = 3.0 - 2 * (not idle or bool(groups.live))
        for group in groups.live:
            group.state = "CREATED" if idle else group.state
        nodes = [node("a", 5, free=free)]
        if known.growth(lambda: nodes, ranks) is not None:  # noqa: B023
            clock.now += restart
            known.ended()
            back = [node("a", 5, free=3.0 if taken_back else 5.0)]
            while (found := known.next(lambda: back)) is None:  # noqa: B023
                clock.now += 1
            sizes_begun.append(found.workers)
            known.began(found.workers)
            ranks = {rank: Joined(rank, "a", "a", 7) for rank in range(found.workers)}
        else:
            trained += 1
        clock.now += 1
    assert trained >= 0.9 * 3600, (trained, sizes_begun)
    assert 1 + len(sizes_begun) <= 8
    assert sizes_begun == ([2] * len(sizes_begun) if taken_back else [4])


def test_auto_takes_what_others_do_not_hold(clock: Clock) -> None:
    most, said = replace(asked(), workers=4), list[str]()

    def found(*free: float, possible: Sequence[int] = (1, 2, 3, 4)) -> int:
        clock.now, answers = 0.0, iter(free)
        last = [0.0]

        def look() -> list[Node]:
            last[0] = next(answers, last[0])
            return [node("a", 5, free=last[0])]

        return sizes.that_are_free(most, possible.__contains__, look, said.append)

    assert found(5) == 4 and clock.now == 0
    assert found(1, 2, 5) == 4 and clock.now == 1, "another run has just ended"
    assert not said
    assert found(4) == 3 and clock.now == sizes._GIVEN_BACK_SECONDS, "one CPU is left for the data"
    assert said == [
        "cluster.workers=auto: others hold the room of 1 of 4 workers, so the run has 3; with "
        "cluster.workers={min: 3, max: 4} it would grow later"
    ]
    assert found(4, possible=(2, 4)) == 2, "three cannot share the mesh, or the memory"
    assert sizes.that_are_free(most, lambda _: True, lambda: [replace(node("a", 5), free={})], said.append) == 4
    assert found(2, possible=(4,)) == found(0) == found(1) == 4, "then it waits for them"


def test_auto_takes_as_many_as_a_range_would(clock: Clock) -> None:
    """Four GPUs and four CPUs are free: the data needs one of the latter."""
    most = asked(GPU=1.0)
    half = Node(id="a", name="a", total={"CPU": 9.0, "GPU": 8.0}, free={"CPU": 4.0, "GPU": 4.0})
    assert sizes.that_are_free(most, lambda _: True, lambda: [half], lambda _: None) == 3
    known = Sizes(most, range(1, 9))
    clock.now += sizes._RETURN_SECONDS
    assert size(known.next(lambda: [half])) == 3


def test_resources_of_our_own_count_as_free(clock: Clock, groups: Groups) -> None:
    known = Sizes(asked(GPU=1.0), [1, 2, 4])
    ranks = {0: Joined(0, "a", "a", 7)}

    def gpus(name: str, free: float) -> Node:
        return Node(id=name, name=name, total={"CPU": 8.0, "GPU": 1.0}, free={"CPU": 4.0, "GPU": free})

    nodes: list[Any] = [gpus("a", 0.0), gpus("b", 1.0)]
    assert known.growth(lambda: nodes, ranks) is None
    clock.now = 10
    known.growth(lambda: nodes, ranks)
    groups.live[0].state = "CREATED"
    assert known.growth(lambda: nodes, ranks) == 2


def test_a_size_that_ray_train_has_waited_for_in_vain_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, tried = Sizes(asked(), [2, 4]), list[int]()

    def attempt(rank: object, board: object, asked: Request, config: object) -> Any:
        def fit() -> None:
            tried.append(asked.workers)
            if asked.workers == 4:
                raise ControllerError(WorkerGroupStartupTimeoutError(4))

        return SimpleNamespace(fit=fit)

    monkeypatch.setattr(driver, "repair_registry", lambda run_dir: None)
    monkeypatch.setattr(driver, "trainer_for", attempt)
    nothing: Any = SimpleNamespace(begin=lambda: None, clear=lambda: None)
    supervisor: Any = SimpleNamespace(next=lambda: known.next(lambda: [node("a", 5)]), until=lambda fit, _: wait([fit]))
    job = RankJob(
        config=make_config(tmp_path),
        prepared=nothing,
        first=True,
        board=nothing,
        device="cpu",
        token=nothing,
        looks=Looks(live=False, colours=False),
        verbose=False,
        in_ray_log=False,
        forced=False,
        notices={},
    )
    foresight: Any = SimpleNamespace(of=lambda ranks: None)
    attempts = Attempts(RunDir.of(job.config), limit=0, step=0, say=print)
    attempts.current = RayAttempt(watch=nothing, nodes=nothing, phases=nothing, waiting=nothing)
    driver._fit(job, tmp_path, supervisor, attempts, known, foresight)
    assert tried == [4, 2]
