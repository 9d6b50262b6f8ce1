"""Several trackers as one: who may stop training, and who may not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from raytune_fsdp.base.errors import Interrupted, TrainingError
from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.record.tracker import Composite, RunStart, Status, Tracker, flatten


class Spy:
    """Notes every call, and raises what it is given."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self.raises = raises

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.raises is not None:
            raise self.raises

    def start(self, run: RunStart) -> None:
        self._note("start")

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        self._note("steps")

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._note("evaluation")

    def event(self, name: str, /, **fields: object) -> None:
        self._note(f"event {name} {fields}")

    def state(self) -> dict[str, str]:
        self._note("state")
        return {f"id{id(self)}": "x"}

    def finish(self, status: Status) -> None:
        self._note(f"finish {status}")


def use(tracker: Tracker) -> None:
    tracker.start(RunStart(name="x", attempt=1))
    tracker.steps([], 1, 1)
    tracker.evaluation(1, {})
    tracker.event("saved", name="n", self=1)
    tracker.state()
    tracker.finish("finished")


def test_a_failing_tracker_is_told_once_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    first, broken, last = Spy(), Spy(OSError("no network")), Spy()
    with caplog.at_level(logging.WARNING):
        use(Composite((first, broken, last)))
    assert first.calls == broken.calls == last.calls and len(last.calls) == 6
    assert len(caplog.records) == 1 and "Spy failed" in caplog.text and "no network" in caplog.text


def test_states_are_merged() -> None:
    first, broken, last = Spy(), Spy(ValueError()), Spy()
    assert Composite([first, Tracker(), broken, last]).state() == {f"id{id(first)}": "x", f"id{id(last)}": "x"}


@pytest.mark.parametrize("error", [TrainingError("metrics.jsonl cannot be written"), Interrupted("SIGTERM")])
def test_our_own_errors_reach_training_after_everyone_had_a_turn(error: Exception) -> None:
    last = Spy()
    with pytest.raises(type(error), match=str(error)):
        Composite([Spy(error), last]).steps([], 1, 1)
    assert last.calls == ["steps"]


def test_an_interrupt_is_not_held_up() -> None:
    last = Spy()
    with pytest.raises(KeyboardInterrupt):
        Composite([Spy(KeyboardInterrupt()), last]).steps([], 1, 1)
    assert last.calls == []


def test_the_null_tracker_takes_everything() -> None:
    use(Tracker())
    assert Tracker().state() == {}


def test_flatten() -> None:
    nested = {"data": {"train": [{"path": "a", "weight": 1.5}, {"path": "b"}], "eval": []}, "seed": 0, "lora": None}
    assert flatten(nested) == {
        "data.train.0.path": "a", "data.train.0.weight": 1.5, "data.train.1.path": "b", "data.eval": [], "seed": 0,
        "lora": None,
    }  # fmt: skip
