"""Three kills, always the same; `make kills` has thirty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import Kills, endure, judge


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_in_a_save_and_a_rank_with_the_driver_in_a_load(tmp_path: Path) -> None:
    """The attempt that loads is brought about by another kill."""
    first = [(Kills.a_node, Kills.a_save), (Kills.a_rank_and_the_driver, Kills.a_load)]
    found = endure(tmp_path, 3, seed=1, first=first)
    assert judge(found) == []
    assert [kill.what for kill in found["kills"]][1:] == ["a rank", "a rank and the driver"]
    assert found["kills"][-1].next_step is not None
