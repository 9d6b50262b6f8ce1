"""Rows as LLaMA-Factory reads them, for `format.type: python` of a converted config."""

from __future__ import annotations

from typing import Any


def with_input(row: dict[str, Any]) -> dict[str, Any]:
    """An Alpaca row with its input in the line after its instruction; what is empty leaves no line."""
    texts = (row.get("instruction"), row.get("input"))
    return {**row, "instruction": "\n".join(each for each in texts if each)}
