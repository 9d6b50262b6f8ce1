"""Write the page that has its points inside: `python -m docs.make.planner_page docs/planner.html`.

It traces 800 steps: 20 to 40 minutes on two cores. `--points-of FILE` takes them from a page that is
there, where only its looks have changed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.predict.page.document import static_page
from raytune_fsdp.predict.page.grid import compute

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def points_of(page: Path) -> dict[str, Any]:
    """The grid of a page that was written before."""
    found = _DATA.search(page.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"error: {page} has no points: leave out --points-of, and they are computed")
    grid: dict[str, Any] = json.loads(found[1])["points"]["grid"]
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the planner as one file, for well-known models.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--points-of", type=Path, metavar="FILE", help="a page whose points are taken")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1), metavar="N")
    found = parser.parse_args()
    points = points_of(found.points_of) if found.points_of else compute(processes=found.processes)
    text = static_page(points)
    replace_at_once(found.file, text.encode())
    print(f"{found.file}: {len(text) / 1e3:,.0f} KB")


if __name__ == "__main__":
    main()
