"""Read the numbers of a row that a loss of the user's own is told (`train.loss_columns`)."""

from __future__ import annotations

import math
from contextlib import suppress
from decimal import Decimal
from typing import Any

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.rows.conversation import MISSING_COLUMN
from raytune_fsdp.data.sources.source import shorten

_MOST = (2 - 2**-23) * 2.0**127
"""The largest number of float32, which losses are computed in."""


def read_number(row: dict[str, Any], name: str, where: str) -> float:
    """Return a column that a loss is told; true and false are 1 and 0. Raises RowError."""
    if name not in row:
        raise RowError(
            f"{where}: has no column {name!r}, it has {shorten(', '.join(map(repr, row)) or 'none')}; name the right "
            "one in train.loss_columns, or remove the row",
            MISSING_COLUMN,
        )
    value, number, way_out = row[name], math.nan, "train.loss_columns tells it to the loss: correct or remove the row"
    if value is None:
        raise RowError(f"{where}: column {name!r} is null; {way_out}", "null")
    if not isinstance(value, int | float | Decimal):
        kind = "text" if isinstance(value, str) else f"of type {type(value).__name__}"
        raise RowError(f"{where}: {name}={shorten(repr(value))} is {kind}, not a number; {way_out}", "wrong_type")
    with suppress(OverflowError, ValueError):
        number = float(value)
    if not abs(number) <= _MOST:
        raise RowError(
            f"{where}: {name}={shorten(value)} is no finite number of float32, which losses are computed in; {way_out}",
            "wrong_type",
        )
    # The nearest number stands for a fraction, as for those in JSON; a whole number may be one that counts or names.
    if number != value and value == int(value):
        raise RowError(
            f"{where}: {name}={shorten(value)} is a whole number that no float64 is equal to; {way_out}", "wrong_type"
        )
    return number
