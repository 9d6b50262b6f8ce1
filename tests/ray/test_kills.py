"""Three kills, always the same; `make kills` has thirty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import endure, judge


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_kills(tmp_path: Path) -> None:
    found = endure(tmp_path, 3, seed=2)
    assert judge(found) == []
    assert len(found["kills"]) >= 3
    assert all(kill.next_step is not None or kill.noticed is not None for kill in found["kills"])
