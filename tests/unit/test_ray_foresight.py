"""Which numbers of ranks a run may have, by what the planner says of each. No Ray is started, and nothing is traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.measured import NotPredicted, Predicted
from raytune_fsdp.launch.ray import driver, rank
from raytune_fsdp.launch.ray import driver as module
from raytune_fsdp.launch.ray.driver import Foresight
from raytune_fsdp.launch.ray.nodes.sizes import Sizes
from raytune_fsdp.launch.ray.resources import Node, Request
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.predict import preflight
from tests.runs import make_config

GIB = 2**30
EIGHT = list(range(1, 9))
Make = Callable[..., Foresight]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """On a node with eight GPUs of 80 GB; ranks share so many GiB of weights."""

    def made(gibibytes: int, workers: Any, *, kind: str = "H100", force: bool = False) -> Foresight:
        def predict(config: object, prepared: object, plan: Plan, *_: object, **__: object) -> Predicted:
            kept = gibibytes * GIB // plan.layout.world
            return Predicted(kept=kept, peak=kept, where="somewhere", assumed=0, checkpoint=1, seconds=1.0)

        monkeypatch.setattr(module, "predict_for_run", predict)
        monkeypatch.setattr(preflight, "predict_for_run", predict)
        config = make_config(
            tmp_path, cluster={"launch": "ray", "workers": workers, "device": "cuda"}, train={"global_batch": 64}
        )
        run: Any = SimpleNamespace(census=None, dry=False, place=RunDir.of(config))
        node = Node(id="a", name="a", total={"GPU": 8, "CPU": 64, f"accelerator_type:{kind}": 1}, free={})
        asked = Request(workers=8, per_worker={"GPU": 1}, accelerator_type=None, placement="pack", device="cuda")
        return Foresight(config, run, asked, [node], force=force)

    return made


def test_a_run_starts_with_the_numbers_that_fit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not refused for its smallest number: also the cluster is asked for the smallest that fits."""
    known = make(200, {"min": 1, "max": 8})
    node = Node(id="a", name="a", total={"GPU": 8, "CPU": 64, "accelerator_type:H100": 1}, free={})
    began = list[object]()

    def train(
        config: object, prepared: object, ranks: int, sizes: Sizes, demand: object, *_: object, **__: object
    ) -> None:
        began.extend([ranks, sizes.fewest.workers, sizes.next(lambda: [replace(node, free=node.total)]), demand])

    standing: Any = SimpleNamespace(complete=False)
    for name, instead in {
        "prepare": lambda *_, **__: (known._prepared, standing), "nodes": lambda: [node], "may_grow": lambda: False,
        "Board": object, "check_device": lambda *_: None, "check_reach": lambda *_: None,
        "on_world": lambda config, prepared, standing, ranks: ranks, "_train": train,
    }.items():  # fmt: skip
        monkeypatch.setattr(driver, name, instead)
    connecting = Future[Any]()
    connecting.set_result(SimpleNamespace(about="a Ray", head=None))
    signals: Any = SimpleNamespace(take=lambda: None)
    phases: Any = SimpleNamespace(finished=lambda name: None)
    driver.run_on_ray(known._config, connecting, signals=signals, phases=phases, progress=None, say=lambda _: None)
    ranks, fewest, first, demand = began
    assert (ranks, fewest, demand._steps) == (3, 3, {})
    assert isinstance(first, Request) and first.workers == 8


def test_a_run_begins_where_only_the_smallest_numbers_do_not_fit(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    found = make(200, {"min": 1, "max": 8})
    with caplog.at_level(logging.WARNING):
        assert found.that_fit(EIGHT, 8, print) == [3, 4, 5, 6, 7, 8]
        assert isinstance(found.of(3), Predicted)
    (record,) = caplog.records
    assert "fewer than 3 ranks" in record.getMessage() and record.getMessage().endswith("set cluster.workers.min=3")


def test_all_numbers_that_fit_are_kept(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert make(70, {"min": 1, "max": 8}).that_fit(EIGHT, 8, print) == EIGHT
    assert make(200, {"min": 1, "max": 8}, kind="T-1000").that_fit(EIGHT, 8, print) == EIGHT
    assert not caplog.text, "of a GPU that is not known nothing is said"


def test_forced_numbers_stay(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    found = make(900, {"min": 1, "max": 8}, force=True)
    assert found.that_fit(EIGHT, 8, print) == EIGHT
    assert "it may run out of memory" in caplog.text


def test_a_run_that_fits_on_no_number_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"does not fit: .* It fits on 16 ranks \(cluster\.workers\.max=16\)"):
        make(900, {"min": 1, "max": 8}).that_fit(EIGHT, 8, print)
    with pytest.raises(ConfigError, match=r"does not fit: .* It fits on 2 ranks \(cluster\.workers=2\)"):
        make(100, 1).that_fit([1], 8, print)


def test_a_number_that_the_cluster_has_no_room_for_is_no_way_out(make: Make) -> None:
    """Unless nodes may come."""
    found = make(200, {"min": 1, "max": 8})
    with pytest.raises(ConfigError, match=r"It fits on 4 ranks \(add nodes: the cluster has no room for them\)"):
        found.that_fit(EIGHT, 2, print)
    assert found.that_fit(EIGHT, None, print) == [3, 4, 5, 6, 7, 8]


def test_an_attempt_is_never_refused(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    found = make(100, {"min": 1, "max": 8})
    for _ in range(2):
        assert isinstance(found.of(1), Predicted)
    assert caplog.text.count("it may run out of memory") == 1


@pytest.mark.parametrize(("here", "seconds"), [(2, 1.0), (1, None)])
def test_no_time_is_predicted_of_ranks_on_several_nodes(
    monkeypatch: pytest.MonkeyPatch, here: int, seconds: float | None
) -> None:
    monkeypatch.setattr("ray.train.get_context", lambda: SimpleNamespace(get_local_world_size=lambda: here))
    one = Predicted(kept=1, peak=1, where="somewhere", assumed=0, checkpoint=1, seconds=1.0)
    found = rank._as_placed(one, 2)
    assert isinstance(found, Predicted) and found.seconds == seconds
    assert rank._as_placed(NotPredicted("why"), 2) == NotPredicted("why") and rank._as_placed(None, 2) is None
