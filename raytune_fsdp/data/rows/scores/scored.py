"""Read rows with a text or a conversation and its class or score, and make the documents that a head scores.

A scored document is its tokens, whole, and one token of padding, its only label. So what it is scored by is the place
from which that label would be predicted: its last own token, which transformers takes, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.batch import IGNORE, Role
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config.sections.formats import ScoreFormat
from raytune_fsdp.data.mixture import FIFTH_ORDER
from raytune_fsdp.data.rows.conversation import Conversation, check_text, read_column, read_conversation
from raytune_fsdp.data.rows.numbers import read_number, read_weight
from raytune_fsdp.data.rows.pairs import Answers, format_of, shared_of
from raytune_fsdp.data.rows.scores.scoring import Scoring
from raytune_fsdp.data.sources.source import shorten

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import Int32Array
    from raytune_fsdp.data.rows.formats import Document

_DIGITS = re.compile(r"(\d{1,9})(\.0+)?")


def read_scored(
    row: dict[str, Any], format: ScoreFormat, where: str, *, columnar: bool, order: int
) -> str | Conversation:
    """Return the text or the conversation of a row. Raises RowError. `columnar`, `order`: see `read_conversation`."""
    if format.text is not None:
        return check_text(read_column(row, format.text, "text", where, guess=False), f"{where}: {format.text}")
    assert format.messages is not None, "one of the two"
    read_column(row, format.messages, "messages", where, guess=False)
    read_as = format_of(format.messages, format)
    return read_conversation(row, read_as, where, columnar=columnar, order=max(order, FIFTH_ORDER))


def read_told(row: dict[str, Any], format: ScoreFormat, scoring: Scoring, where: str) -> tuple[float, ...]:
    """Return what the loss is told of a row: GROUP_COLUMNS. Raises RowError."""
    value = _score(row, format.score, where) if format.score else _class(row, format.label or "", scoring, where)
    return float(Role.SCORED), read_weight(row, format.weight, where), value, 0.0


def _score(row: dict[str, Any], column: str, where: str) -> float:
    value = row.get(column)
    if isinstance(value, str):  # in CSV files all values are texts
        with suppress(ValueError):
            row = {**row, column: float(value)}
    return read_number(row, column, where, "format.score")


def _class(row: dict[str, Any], column: str, scoring: Scoring, where: str) -> float:
    value, labels = read_column(row, column, "label", where, guess=False), scoring.labels
    if isinstance(value, str) and value in labels:
        return float(labels.index(value))
    number = _number_of(value, scoring.outputs)
    if number is None:
        near = get_close_matches(value, labels, n=1) if isinstance(value, str) else []
        names = f"{shorten(', '.join(map(repr, labels)))}, or their numbers " if labels else ""
        raise RowError(
            f"{where}: {column}={shorten(repr(value))} is none of the classes ({names}0 to {scoring.outputs - 1})"
            + (f"; nearest: {near[0]!r}" if near else "")
            + "; correct or remove the row, or name the class in model.head.labels",
            "wrong_class",
        )
    said = {str(value).casefold(), str(number)}
    meant = [index for index, label in enumerate(labels) if label.casefold() in said]
    numbers = bool(labels) and all(map(_DIGITS.fullmatch, labels))
    if number not in meant and (meant or numbers):
        other = f", and the name of that with the number {meant[0]}" if meant else ", and names are numbers, too"
        raise RowError(
            f"{where}: {column}={shorten(repr(value))} is the number of the class {labels[number]!r}{other}: write "
            "names as texts, as model.head.labels has them, or leave that out",
            "wrong_class",
        )
    return float(number)


def _number_of(value: Any, classes: int) -> int | None:
    """Return the number of a class; None if it is none."""
    if isinstance(value, str):
        found = _DIGITS.fullmatch(value.strip())  # as CSV files have it, and pandas writes it
        value = None if found is None else int(found[1])
    if isinstance(value, bool) and classes != 2:
        return None
    if not isinstance(value, int | float | Decimal) or (isinstance(value, Decimal) and not value.is_finite()):
        return None
    return int(value) if 0 <= value < classes and value == int(value) else None


def with_padding(ids: Int32Array, scoring: Scoring, where: str) -> tuple[Int32Array, Int32Array] | RowError:
    """Return the ids of a document with a token of padding behind them, and its labels."""
    if not len(ids):
        return RowError(f"{where}: the tokenizer makes no token of it; correct or remove the row", "empty")
    if ids[-1] == scoring.pad_token:
        return RowError(
            f"{where}: its last token is {shorten(scoring.pad_text)!r}, which texts are padded with, and they are "
            "scored at their last token that is not padding; set model.head.pad_token to a special token with which no "
            "row ends (a copy of the tokenizer may have one more: model.tokenizer), or correct or remove the row",
            "ends_with_padding",
        )
    ids = np.append(ids, np.int32(scoring.pad_token))
    labels = np.full(len(ids), IGNORE, dtype=np.int32)
    labels[-1] = scoring.pad_token
    return ids, labels


def compared(answers: Answers, documents: Sequence[Document], where: str) -> Document | RowError:
    """Return the first document of a pair with the other one, or what is wrong with them."""
    first, other = documents
    if np.array_equal(first.input_ids, other.input_ids):
        return RowError(
            f"{where}: {' and '.join(answers.columns)} are the same {len(first.input_ids) - 1} token(s), so neither is "
            "to be preferred; correct or remove the row",
            "equal_answers",
        )
    chosen, rejected = (
        replace(each, columns=(float(role), answers.weight, answers.margin, 0.0))
        for role, each in zip(answers.roles, documents, strict=True)
    )
    return replace(chosen, others=(rejected,), shared=shared_of(documents))


def cut_scored(document: Document, length: int) -> Document | None:
    """Return a scored document of at most so many tokens; None if none of its own would be left.

    Its end is cut, as transformers truncates texts, and the token of padding stays. What is left must not end with
    another one.
    """
    kept, pad = document.input_ids[: length - 1], document.input_ids[-1]
    own = np.flatnonzero(kept != pad)
    if not len(own):
        return None
    kept = kept[: int(own[-1]) + 1]
    labels = np.append(np.full(len(kept), IGNORE, dtype=np.int32), pad)
    return replace(document, input_ids=np.append(kept, pad), labels=labels)
