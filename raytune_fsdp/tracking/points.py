"""Lines and events of the record in the form that MLflow takes."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from raytune_fsdp.tracking.lines import step_of, time_of
from raytune_fsdp.tracking.names import step_values, with_perplexity

_MAX_TAG_CHARS, _MAX_KEY_CHARS = 5000, 250

Point = tuple[str, float, int, int]
"""A metric's name, value, time in milliseconds since 1970, and step."""


def points_of(line: Mapping[str, Any], otherwise: int) -> Iterator[Point]:
    """The points of a line. Lines of older versions have no time: theirs is `otherwise`."""
    step, at = step_of(line), time_of(line)
    values = step_values(line) if line["kind"] == "step" else with_perplexity(line["values"])
    for name, value in {mlflow_name(name): float(value) for name, value in values.items()}.items():
        yield name, value, otherwise if at is None else at, step


def event_tag(name: str, fields: object) -> tuple[str, str]:
    return mlflow_name(f"event.{name}"), json.dumps(fields, default=str)[:_MAX_TAG_CHARS]


@lru_cache(1000)
def mlflow_name(key: str) -> str:
    """The key in characters and a length that MLflow accepts, and without `//`, `..` or a leading `/`."""
    return posixpath.normpath(re.sub(r"[^\w./: -]", "_", key)).lstrip("/.")[:_MAX_KEY_CHARS] or "_"
