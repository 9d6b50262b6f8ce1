"""The page of results says of planned memory what was measured, and that is what is promised."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 2**20


def test_the_page_has_the_numbers_and_they_agree() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "planned_memory.json").read_text())["cases"]
    stated = (ROOT / "docs" / "results.md").read_text().partition("## Memory that is planned")[2].partition("\n## ")[0]
    assert len(cases) >= 8 and sum(case["later"] for case in cases.values()) >= 2
    for name, case in cases.items():
        said, found = case["planned"], case["measured"]
        assert (said["between_steps"], said["collectives"]) == (found["between_steps"], found["collectives"]), name
        assert abs(said["peak"] - found["tensors"]) <= max(0.05 * found["tensors"], 8 * MIB), name
        cells = " | ".join(
            f"{number:,.2f}"
            for number in (
                found["between_steps"] / MIB,
                said["peak"] / MIB,
                found["tensors"] / MIB,
                found["raw"] / MIB,
                found["collectives"] / MIB,
            )
        )
        assert f"| {name}{', later' if case['later'] else ''} |" in stated and f"| {cells} |" in stated, name
