"""The page of results says of planned times what was measured, and that is what is promised."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.planned_time import ALL, WITHIN, row_of

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_numbers_and_they_agree() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "planned_time.json").read_text())["cases"]
    stated = (ROOT / "docs" / "results.md").read_text().partition("## Time that is planned")[2].partition("\n## ")[0]
    assert cases.keys() == ALL.keys() and sum(case["later"] for case in cases.values()) == 2
    for name, case in cases.items():
        assert abs(case["planned"]["step"] / case["measured"] - 1) <= WITHIN, name
        assert row_of(name, case) in stated, name
