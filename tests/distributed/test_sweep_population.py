"""Members of a population that go on as forks of better ones, while the sweep's command is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from tests.distributed.test_sweep import GONE_SECONDS, steps
from tests.running_sweeps import SweepCommand, gone, spec_of


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_population_that_is_killed_has_the_log_of_an_undisturbed_one(tmp_path: Path) -> None:
    more = {"scheduler": {"type": "pbt", "every": 4, "seed": 1}, "concurrent": 2}
    whole = SweepCommand(tmp_path, spec_of(tmp_path, "whole", **more))
    assert whole.end(600) == 0, whole.said
    sweep = SweepCommand(tmp_path, spec_of(tmp_path, "disturbed", **more))
    sweep.until(lambda: b'"draw"' in sweep.log)
    assert gone(sweep.kill(), GONE_SECONDS)
    sweep.start()
    assert sweep.end(600) == 0, sweep.said
    assert sweep.log == whole.log and sweep.trajectories() == whole.trajectories()
    forks = [run for run in sweep.trajectories() if "-g" in run]
    assert len(forks) >= 3 and steps(sweep) == 4 * 16
    for run in forks:
        first = sweep.trajectories()[run][0]["step"]
        lineage = json.loads((sweep.place.parent / run / "lineage.json").read_text())
        assert first in (5, 9, 13) and lineage
    winner = load_config(sweep.place / "best.yaml").run.name
    assert winner in forks, "the audit below is of a chain"
    assert main(["audit", str(sweep.place.parent / winner), "--chain"]) == 0, "trained again from its root on"
