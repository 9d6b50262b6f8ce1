"""Exports as tasks of Ray, on checkpoints that are there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.launch.ray.tasks.after_commit import AfterCommit
from raytune_fsdp.launch.ray.tasks.exports import Exports
from raytune_fsdp.launch.shared_storage import put_token
from raytune_fsdp.plan.run_dir import RunDir
from tests.checkpoints import checkpoints, pieces_of, tensors_in
from tests.ray.jobs import config_of
from tests.runs import trajectory

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]


@dataclass
class Told:
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    """Of a run of 12 steps, with a checkpoint of every fourth."""
    config = config_of(tmp_path, train={"global_batch": 10, "micro_batch": 2, "max_steps": 12})
    trajectory(config, 1)
    return RunDir.of(config)


def _exports(place: RunDir, told: Told, every: int) -> AfterCommit:
    token = put_token(place.path, "the driver")
    chosen = ExportConfig(every=every, dtype="trained", push="never/pushed")
    exports = Exports(
        chosen, every, place, token, trust_remote_code=False, env=None, event=told.event, say=told.lines.append
    )
    return AfterCommit(exports, place, lambda: True, told.lines.append)


def test_what_was_left_out_is_made_up_for_and_failures_are_told(place: RunDir) -> None:
    first, second, last = checkpoints(place.path)
    assert [first.step, second.step, last.step] == [4, 8, 12]
    left = place.exports / ".step-00000004.export-17"
    left.mkdir(parents=True)
    damaged = pieces_of(second)[0]
    damaged.unlink()
    told = Told()
    exports = _exports(place, told, every=4)
    assert not left.exists(), "what a driver that was killed had begun"
    exports.make_up()
    exports.make_up()  # the next attempt of the same driver
    assert exports.finish(lambda: False, lambda: None)
    outcomes = {fields["step"]: (name, fields) for name, fields in told.events}
    assert {step: name for step, (name, _) in outcomes.items()} == {4: "exported", 8: "export_failed", 12: "exported"}
    assert len(told.events) == 3 and told.lines[0].startswith("waiting for the export of step 4, 8, 12 (")
    assert f"{damaged.name} is gone" in outcomes[8][1]["problem"] and str(second.path) in outcomes[8][1]["problem"]
    assert any("export of step 8 failed" in line for line in told.lines)
    there = sorted(path.name for path in (place.exports).iterdir())
    assert there == ["step-00000004", "step-00000012"]
    for found in (first, last):
        exported = place.exports / f"step-{found.step:08d}"
        expected = {n.removeprefix("model."): t for n, t in tensors_in(found).items() if n.startswith("model.")}
        weights = AutoModelForCausalLM.from_pretrained(exported).state_dict()
        assert all((weights[name] == tensor).all() for name, tensor in expected.items())
        assert f"step {found.step}," in (exported / "README.md").read_text()


def _waiting(exports: AfterCommit) -> list[int]:
    """The steps that wait, once the storage has said all that it was asked."""
    while exports._call is not None or exports._calls:
        exports._look_at_storage()
        time.sleep(0.01)
    return [found.step for found in exports._waiting]


def test_a_checkpoint_that_came_later_than_planned_is_exported_in_its_place(place: RunDir) -> None:
    exports = _exports(place, Told(), every=100)
    for step in (96, 100, 104, 203, 204, 300):
        exports.committed(CommittedCheckpoint(step, 1, place.checkpoints))
    assert _waiting(exports) == [100, 203, 300]
    again = _exports(place, Told(), every=100)
    (place.exports / "step-00000203").mkdir(parents=True)
    for step in (203, 204, 300):
        again.committed(CommittedCheckpoint(step, 1, place.checkpoints))
    assert _waiting(again) == [300], "what is there is not made again"


def test_a_checkpoint_that_is_gone_and_a_stop(place: RunDir) -> None:
    told = Told()
    exports = _exports(place, told, every=4)
    exports.committed(CommittedCheckpoint(16, 1, place.checkpoints))
    assert not exports.finish(lambda: exports._running is not None, lambda: None), "3 more are wanted"
    assert _waiting(exports) == [4, 8, 12]
    exports._waiting.clear()
    assert exports._running is not None
    while not told.events:
        exports.look()
    ((name, fields),) = told.events
    assert name == "export_failed" and "removed before the export: raise checkpoint.keep_last" in fields["problem"]
