"""Read numbers: those that a loss is told (`train.loss_columns`, weights, margins), and rows that are tokens."""

from __future__ import annotations

import math
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config.sections.formats import TokensFormat
from raytune_fsdp.data.rows.conversation import MISSING_COLUMN, read_column
from raytune_fsdp.data.sources.source import shorten

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import Int32Array

_MOST = (2 - 2**-23) * 2.0**127
"""The largest number of float32, which losses are computed in."""


def read_number(row: dict[str, Any], name: str, where: str, field: str = "train.loss_columns") -> float:
    """Return a column that a loss is told; true and false are 1 and 0. Raises RowError.

    `field`: the field of the config that names it.
    """
    if name not in row:
        raise RowError(
            f"{where}: has no column {name!r}, it has {shorten(', '.join(map(repr, row)) or 'none')}; name the right "
            f"one in {field}, or remove the row",
            MISSING_COLUMN,
        )
    value, number, way_out = row[name], math.nan, f"{field} tells it to the loss: correct or remove the row"
    if value is None:
        raise RowError(f"{where}: column {name!r} is null; {way_out}", "null")
    if not isinstance(value, int | float | Decimal):
        kind = "text" if isinstance(value, str) else f"of type {type(value).__name__}"
        if _spells_a_number(value):
            way_out = (
                f"{field} tells it to the loss: write it as a number, as JSON Lines and Parquet can and CSV cannot, "
                "or remove the row"
            )
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


def _spells_a_number(value: Any) -> bool:
    with suppress(ValueError):
        return isinstance(value, str) and math.isfinite(float(value))
    return False


def read_weight(row: dict[str, Any], name: str | None, where: str) -> float:
    """Return the weight of a row's loss; 1 if no column has it. Raises RowError."""
    weight = 1.0 if name is None else read_number(row, name, where, "format.weight")
    if weight < 0:
        raise RowError(
            f"{where}: {name}={weight:g} is less than 0, and a row's weight is not: correct or remove the row",
            "wrong_type",
        )
    return weight


# Rows that are already tokens.


def read_tokens(row: dict[str, Any], format: TokensFormat, where: str) -> tuple[Int32Array, Int32Array]:
    """Return input ids and labels of a row. Raises RowError."""
    ids = _integers(read_column(row, format.input_ids, "input_ids", where), format.input_ids, where)
    column = format.labels if format.mask is None else format.mask
    if column is None:
        return ids, ids
    if column not in row:
        field = "labels" if format.mask is None else "mask"
        raise RowError(
            f"{where}: has no column {column!r}; name the right one in the dataset's format.{field}, "
            "or set it to null to train on every token",
            MISSING_COLUMN,
        )
    values = read_column(row, column, "labels", where)
    if format.mask is not None and isinstance(values, list):
        values = [int(value) if isinstance(value, bool) else value for value in values]  # JSON's true and false
    given = _integers(values, column, where)
    if len(given) != len(ids):
        raise RowError(
            f"{where}: {column} has {len(given)} entries, {format.input_ids} has {len(ids)}; each token needs one",
            "wrong_type",
        )
    if format.mask is not None:
        wrong = (given != 0) & (given != 1)
        rule = "must be 1 where the token is trained on, and 0 elsewhere"
    else:
        wrong = (given != IGNORE) & (given != ids)
        rule = f"must be {IGNORE} or equal to the input id at the same place: do not shift labels, the model does"
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise RowError(
            f"{where}: {column}[{index}]={given[index]}, {format.input_ids}[{index}]={ids[index]}; it {rule}",
            "wrong_type",
        )
    return ids, given if format.mask is None else np.where(given == 1, ids, np.int32(IGNORE))


def _integers(values: Any, column: str, where: str) -> Int32Array:
    if isinstance(values, list) and not values:
        raise RowError(f"{where}: {column}=[] has no tokens; correct or remove the row", "empty")
    if not isinstance(values, list):
        raise RowError(
            f"{where}: {column}={shorten(values)} is not a list of integers; correct or remove the row", "wrong_type"
        )
    # Not isinstance: True is an int to Python. Nor numpy's own check, which would cut 1.5 off to 1.
    if set(map(type, values)) != {int}:
        index = next(index for index, value in enumerate(values) if type(value) is not int)
        raise RowError(
            f"{where}: {column}[{index}]={shorten(values[index])} is not an integer; correct or remove the row",
            "wrong_type",
        )
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError:
        index = next(index for index, value in enumerate(values) if not -(2**31) <= value < 2**31)
        raise RowError(
            f"{where}: {column}[{index}]={values[index]} is larger than any vocabulary; correct or remove the row",
            "outside_vocabulary",
        ) from None
