"""When the parts of a sweep ran, and how long: beside the log, and nothing is decided by it but the budget."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytune_fsdp.base.durable import open_private
from raytune_fsdp.base.untrusted import UnsoundError, lines_of, parse_json
from raytune_fsdp.record.lines import now


def add_time(path: Path, what: str, **fields: object) -> None:
    """Append a line. A disk that is full must not end the sweep for it."""
    line = json.dumps({"time": now(), "what": what, **fields})
    with suppress(OSError), open(path, "a", encoding="utf-8", opener=open_private) as file:
        file.write(f"{line}\n")


def read_times(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what can be read of the lines."""
    with suppress(OSError, UnsoundError):
        for raw in lines_of(path):
            with suppress(ValueError):
                line = parse_json(raw)
                if isinstance(line, dict):
                    yield line


def hours_used(path: Path) -> float:
    """Return the hours that the ranks of all trials have taken together, as far as it is known."""
    total = 0.0
    for line in read_times(path):
        seconds, ranks = line.get("seconds"), line.get("ranks")
        if line.get("what") == "ended" and all(type(each) in (int, float) for each in (seconds, ranks)):
            total += float(seconds or 0) * float(ranks or 0) / 3600
    return total if math.isfinite(total) else 0.0
