"""A dry run through Ray Train: the same numbers, and as little left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.test_dry_run import tree, with_a_run
from tests.ray.jobs import TRAIN, Command, config_of

pytestmark = pytest.mark.slow


def test_a_dry_run_on_ray_leaves_nothing(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, cluster={"launch": "ray", "workers": 2, "device": "cpu"}, train={**TRAIN, "max_steps": 30},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )  # fmt: skip
    with_a_run(tmp_path)
    before = tree(tmp_path)
    command = Command(config, tmp_path, "--dry-run", "--json")
    code, said = command.end()
    assert code == 0, said
    found = json.loads(said[said.index("{\n") :])
    assert found["ranks"] == 2 and found["steps"] == 30 and found["memory_bytes"] > 1e8, found
    assert found["predicted_bytes"] and found["second_step_seconds"] > 0 and found["load_seconds"] > 1
    after = tree(tmp_path)
    assert {name: after[name] for name in after if name in before} == before
    assert set(after) - set(before) == {"config.yaml", "output.txt", "faults"}, "the test's own"
