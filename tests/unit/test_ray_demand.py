"""What an elastic run asks an autoscaler for. No Ray is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray.nodes import sizes as demand
from raytune_fsdp.launch.ray.nodes.sizes import Demand
from raytune_fsdp.launch.ray.resources import Request
from tests.clock import Clock

ASKED = Request(workers=8, per_worker={"CPU": 2.0}, accelerator_type="A100", placement="pack", device="cpu")
EACH = {"CPU": 2.0, "accelerator_type:A100": 0.001}


@dataclass(eq=False)
class Group:
    bundles: list[dict[str, float]]
    state: str = "PENDING"


class Groups:
    """Ray's placement groups, as a module has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType = demand) -> None:
        self.live: list[Group] = []
        monkeypatch.setattr(module, "placement_group", self.ask)
        monkeypatch.setattr(module, "placement_group_table", lambda group: {"state": group.state})
        monkeypatch.setattr(module, "remove_placement_group", self.live.remove)

    def ask(self, bundles: list[dict[str, float]], strategy: str = "PACK") -> Group:
        self.live.append(Group(bundles))
        return self.live[-1]

    @property
    def sizes(self) -> Sequence[int]:
        assert all(each == EACH for group in self.live for each in group.bundles)
        return [len(group.bundles) for group in self.live]


def test_each_step_to_a_larger_size_is_asked_for_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, groups = Clock(), Groups(monkeypatch)
    monkeypatch.setattr(demand, "time", clock)
    asks = Demand(ASKED, [2, 4, 8])
    asks.look(0)
    assert groups.sizes == [2, 2, 4]
    groups.live[0].state = "CREATED"
    asks.look(0)
    assert groups.sizes == [2, 4], "what has come is left for the run to take"
    asks.look(2)
    assert groups.sizes == [2, 4]
    asks.look(8)
    assert groups.sizes == []
    clock.now = 14.0
    asks.look(2)
    assert groups.sizes == []
    clock.now = 15.0
    asks.look(2)
    assert groups.sizes == [2, 4], "it was not enough, or is lost again"
    asks.clear()
    assert groups.sizes == []
