"""By which versions a run reads and adds, where no checkpoint says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.errors import ResumeError
from raytune_fsdp.run.beginning import beginning_of, put_beginning
from raytune_fsdp.rundir import RunDir


def test_a_run_that_repeats_another_begins_as_that_was_begun(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "again", "")
    assert beginning_of(place) == RunState(newest_order=4), "a new one"
    older = RunState(step=9, identity={"data.order_version": 2}, kernels={"attention": "sdpa"})
    put_beginning(place, older)
    assert beginning_of(place) == RunState(identity={"data.order_version": 2}, kernels={"gradients": "bf16"})
    later = RunState(identity={"data.order_version": 3}, newest_order=4, kernels={"gradients": "fp32"})
    put_beginning(place, later)
    assert beginning_of(place) == later


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"format": 2}', '{"format": 1, "order_version": 2, "newest_order": null}',
        *(
            json.dumps({"format": 1, "order_version": 2, "newest_order": 4, "gradients": "bf16"} | change)
            for change in (
                {"order_version": "2"}, {"order_version": 99}, {"newest_order": True}, {"newest_order": 1},
                {"gradients": "fp8"}, {"gradients": None}, {"base": {}}, {"format": 1.0},
            )
        ),
    ],
)  # fmt: skip
def test_a_forged_beginning_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "begins_as.json").write_text(content)
    with pytest.raises(ResumeError, match=r"begins_as\.json does not say how this run begins \(.*remove the file") as e:
        beginning_of(RunDir(tmp_path, ""))
    assert str(e.value).isprintable()
