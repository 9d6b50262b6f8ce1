"""A row becomes a document: token ids, and labels that say which of them are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.config.data import ChatFormat, CompletionFormat, TokensFormat
from raytune_fsdp.data.chat import check_messages, check_text, resolve_template, to_ids_and_mask
from raytune_fsdp.data.sources import shorten
from raytune_fsdp.errors import DataError
from raytune_fsdp.types import IGNORE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.types import Int32Array


@dataclass(frozen=True, slots=True)
class Document:
    """A row after formatting and tokenizing. `labels[i]` is `input_ids[i]` where token i is trained on, else IGNORE."""

    input_ids: Int32Array
    labels: Int32Array

    @property
    def target_tokens(self) -> int:
        """Tokens that can be trained on; the first one never is, nothing predicts it."""
        return int((self.labels[1:] != IGNORE).sum())

    def cut(self, length: int) -> Document:
        """The first `length` tokens."""
        return Document(self.input_ids[:length], self.labels[:length])


def to_document(
    row: dict[str, Any],
    format: ChatFormat | CompletionFormat | TokensFormat,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    where: str,
    chat_template: str | None = None,
) -> Document:
    """The document of one row. `where` names the row in errors, `chat_template` is the text of a Jinja template."""
    if isinstance(format, ChatFormat):
        messages = check_messages(_column(row, format.messages, "messages", where), column=format.messages, where=where)
        template = resolve_template(tokenizer, chat_template)
        ids, mask = to_ids_and_mask(messages, tokenizer=tokenizer, template=template, where=where)
        labels = [token if trained else IGNORE for token, trained in zip(ids, mask, strict=True)]
    elif isinstance(format, CompletionFormat):
        text = check_text(_column(row, format.text, "text", where), place=f"{where}: {format.text}")
        ids = labels = _completion_ids(text, tokenizer)
    else:
        ids = _integers(_column(row, format.input_ids, "input_ids", where), column=format.input_ids, where=where)
        labels = ids if format.labels is None else _token_labels(row, format, ids, where)
    _check_ids(ids, vocab_size=vocab_size, where=where)
    document = Document(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))
    if not document.target_tokens:
        raise DataError(
            f"{where}: no token of the row can be trained on ({len(ids)} tokens, the first is never a target); "
            f"{_NO_TARGET[format.type]}"
        )
    return document


_NO_TARGET = {
    "chat": "a conversation needs a message with role assistant that the chat template marks as generated",
    "completion": "a text needs two tokens at least, remove the row",
    "tokens": "labels must repeat the input id at some place after the first",
}


def _column(row: dict[str, Any], name: str, field: str, where: str) -> Any:
    if name not in row:
        raise DataError(
            f"{where}: the row has no column {name!r}, it has {shorten(', '.join(map(repr, row)) or 'none')}; "
            f"name the right one in the dataset's format.{field}"
        )
    if row[name] is None:
        raise DataError(f"{where}: column {name!r} is null; correct or remove the row")
    return row[name]


def _completion_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no eos_token, which ends every document with "
            "format.type=completion; set eos_token in its tokenizer_config.json"
        )
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _integers(values: Any, *, column: str, where: str) -> list[int]:
    if not isinstance(values, list) or not values:
        raise DataError(f"{where}: {column}={shorten(values)} is not a list of token ids; correct or remove the row")
    for index, value in enumerate(values):
        if type(value) is not int:
            raise DataError(f"{where}: {column}[{index}]={shorten(value)} is not an integer; correct or remove the row")
    return values


def _token_labels(row: dict[str, Any], format: TokensFormat, ids: Sequence[int], where: str) -> list[int]:
    assert format.labels is not None
    if format.labels not in row:
        raise DataError(
            f"{where}: the row has no column {format.labels!r}; name the right one in the dataset's format.labels, "
            "or set it to null to train on every token"
        )
    labels = _integers(row[format.labels], column=format.labels, where=where)
    if len(labels) != len(ids):
        raise DataError(
            f"{where}: {format.labels} has {len(labels)} entries, {format.input_ids} has {len(ids)}; "
            "each token needs one label"
        )
    for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORE, token):
            raise DataError(
                f"{where}: {format.labels}[{index}]={label}, {format.input_ids}[{index}]={token}; a label must be "
                f"{IGNORE} or equal to the input id at the same place: do not shift labels, the model does that"
            )
    return labels


def _check_ids(ids: Sequence[int], *, vocab_size: int, where: str) -> None:
    for index in (ids.index(min(ids)), ids.index(max(ids))):
        if not 0 <= ids[index] < vocab_size:
            raise DataError(
                f"{where}: token {index} has id {ids[index]}, the model's vocabulary ends at {vocab_size - 1}; use the "
                "model's own tokenizer, or set model.resize_embeddings=true if the tokenizer has tokens that were added"
            )
