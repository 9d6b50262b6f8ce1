"""What was predicted of a run before it started, beside what it measured: a table of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raytune_fsdp.record import names
from raytune_fsdp.record.console import gibibytes
from raytune_fsdp.record.lines import is_number
from raytune_fsdp.record.report.history import History


def predictions(history: History) -> list[tuple[str, str, str, str]]:
    """What it is, predicted, measured, and by how much too much was predicted. Of the last attempt that has both."""
    said: Mapping[str, Any] = {}
    for event in history.events:
        if event["event"] == names.PREDICTED:
            said = event["fields"]
    measured: dict[str, Any] = {}
    for event in history.events:
        if event["event"] == names.PREDICTION_CHECKED:
            measured |= event["fields"]
        elif event["event"] == names.SAVED:
            measured["checkpoint_bytes"] = event["fields"].get("bytes")
    return list(_rows(said, measured))


def _rows(said: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for key, what in (
        ("kept_bytes", "memory that a rank keeps from step to step"),
        ("peak_bytes", "memory of tensors at the most"),
        ("checkpoint_bytes", "a checkpoint"),
        ("step_seconds", "seconds of a step"),
    ):
        one, other = said.get(key), measured.get(key)
        if not is_number(one):
            continue
        if not is_number(other) or not other:
            yield what, _shown(key, one), "not measured", ""
        else:
            yield what, _shown(key, one), _shown(key, other), _off(one, other)


def _off(predicted: Any, measured: Any) -> str:
    return f"{predicted / measured - 1:+.2%}"


def _shown(key: str, value: Any) -> str:
    return f"{value:.3g} s" if key == "step_seconds" else gibibytes(int(value))
