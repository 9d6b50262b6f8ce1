"""A sweep on Ray: one for all of its trials, which ends with it, also where its command is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.running_sweeps import SweepCommand, gone, spec_of

pytestmark = pytest.mark.slow

GONE_SECONDS = 90.0
"""The trials commit, then their Ray ends."""


def on_ray(directory: Path, storage: str, **changes: Any) -> dict[str, Any]:
    spec = spec_of(directory, storage, space={"optim.lr": {"grid": [1e-3, 1e-2]}}, **changes)
    spec["base"]["cluster"] |= {"launch": "ray", "workers": 1, "device": "cpu"}
    return spec


def test_one_ray_for_all_trials_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    local = SweepCommand(tmp_path, spec_of(tmp_path, "local", space={"optim.lr": {"grid": [1e-3, 1e-2]}}))
    assert local.end() == 0, local.said
    sweep = SweepCommand(tmp_path, on_ray(tmp_path, "ray"))
    sweep.until(lambda: b'"value"' in sweep.log)
    left = sweep.kill()
    assert gone(left, GONE_SECONDS), left
    sweep.start()
    assert sweep.end() == 0, sweep.said
    assert sweep.said.count("Ray for all trials: started on this machine") == 1
    assert sweep.log == local.log and sweep.trajectories() == local.trajectories()
