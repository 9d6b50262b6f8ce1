"""`data`: which rows, in which format, in which order, packed how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raytune_fsdp.config.base import Section
from raytune_fsdp.config.rules import safe_name


class ChatFormat(Section):
    type: Literal["chat"] = "chat"
    """Rows hold a conversation."""

    messages: str = "messages"
    """Column with the list of messages, each with `role` and `content`."""


class CompletionFormat(Section):
    type: Literal["completion"]
    """Rows hold plain text; every token is trained on."""

    text: str = "text"
    """Column with the text."""


class TokensFormat(Section):
    type: Literal["tokens"]
    """Rows are tokenized already."""

    input_ids: str = "input_ids"
    """Column with the token ids."""

    labels: str | None = "labels"
    """Column with the labels, -100 where a token is not trained on. Null: every token is trained on."""


Format = Annotated[ChatFormat | CompletionFormat | TokensFormat, Field(discriminator="type")]


class DatasetConfig(Section):
    name: Annotated[str, AfterValidator(safe_name)] | None = None
    """Name in metrics and messages. Default: the file's name without its ending."""

    path: str
    """A JSON Lines file, one row a line."""

    format: Format = Field(default_factory=ChatFormat)
    """How a row becomes a document."""


class DataConfig(Section):
    train: list[DatasetConfig] = Field(min_length=1)
    """Datasets to train on."""

    eval: list[DatasetConfig] = Field(default_factory=list)
    """Datasets to measure the loss on, each on its own curve."""

    seq_len: int = Field(default=2048, ge=2)
    """Tokens in a packed sample."""

    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit` puts whole documents together, none sees another; `none` pads every document to `seq_len`."""

    long_documents: Literal["error", "truncate", "drop"] = "error"
    """What happens to a document of more than `seq_len` tokens. What is cut or dropped is counted."""

    shuffle: Literal["rows", "none"] = "rows"
    """`rows`: a permutation of all rows keyed by `run.seed`; `none`: the order of the files."""

    window: int = Field(default=4096, ge=1)
    """Rows that are packed together: the unit of data work."""

    chat_template: str | None = None
    """File with a Jinja chat template to use in place of the tokenizer's own."""
