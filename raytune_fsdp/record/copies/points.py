"""Lines of the record in the form that MLflow takes."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from raytune_fsdp.record.lines import step_of, time_of
from raytune_fsdp.record.names import node_values, step_values, with_perplexity

_MAX_KEY_CHARS = 250

Point = tuple[str, float, int, int]
"""A metric's name, value, time in milliseconds since 1970, and step."""


def points_of(line: Mapping[str, Any], otherwise: int) -> Iterator[Point]:
    """The points of a line. Lines of older versions have no time: theirs is `otherwise`."""
    return _points(line, step_values(line) if line["kind"] == "step" else with_perplexity(line["values"]), otherwise)


def node_points_of(line: Mapping[str, Any], otherwise: int) -> Iterator[Point]:
    """What a line says about the nodes."""
    return _points(line, node_values(line), otherwise)


def _points(line: Mapping[str, Any], values: Mapping[str, float], otherwise: int) -> Iterator[Point]:
    step, at = step_of(line), time_of(line)
    for name, value in {mlflow_name(name): float(value) for name, value in values.items()}.items():
        yield name, value, otherwise if at is None else at, step


@lru_cache(1000)
def mlflow_name(key: str) -> str:
    """The key in characters and a length that MLflow accepts, and without `//`, `..` or a leading `/`."""
    return posixpath.normpath(re.sub(r"[^\w./: -]", "_", key)).lstrip("/.")[:_MAX_KEY_CHARS] or "_"
