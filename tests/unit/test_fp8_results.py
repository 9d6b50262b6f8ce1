"""The page of results says of 8 bits what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fp8 import BOUND, of_seeds, rows_of

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_numbers() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "fp8.json").read_text())
    stated = (ROOT / "docs" / "results.md").read_text().partition("## The demo in 8 bits")[2].partition("\n## ")[0]
    found = result["relative_to_bf16"]
    assert len(result["seeds"]) == 3 and result["steps"] == 200
    for row in rows_of(found):
        assert row in stated, row
    for kind in ("tensorwise", "rowwise"):
        assert abs(of_seeds(found["third"][kind])) <= BOUND
        assert f"{result['worlds'][kind]:.1%}".replace("%", " %") in stated
