"""`data.*.format`: how a row becomes a document, and which of its tokens are trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytune_fsdp.config.base import Section


class ChatFormat(Section):
    type: Literal["chat"] = "chat"
    """Rows hold a conversation: a list of messages, each with a role and a content, rendered by the chat template."""

    messages: str = "messages"
    """Column with the list of messages. ShareGPT files call it `conversations`."""

    role: str | None = None
    """Key of a message's role. Null: `role`, or `from` (ShareGPT) where messages have that."""

    content: str | None = None
    """Key of a message's text. Null: `content`, or `value` (ShareGPT) where messages have that."""

    roles: dict[str, Literal["system", "developer", "user", "assistant", "tool"]] = Field(default_factory=dict)
    """What the names of roles in the file mean: system, developer, user, assistant or tool. `human`, `gpt` and other
    common names need no entry."""

    tools: str | None = "tools"
    """Column with the tools that the assistant may call: a list of JSON schemas, or that list as JSON text. Rows
    without it are fine. Null: the column is not read."""

    loss: Literal["assistant", "last_turn", "all"] = "assistant"
    """Tokens that are trained on: all turns of the assistant, its last turn, or every token. A message with
    `"train": false` is never trained on."""


class InstructionFormat(Section):
    type: Literal["instruction"]
    """Rows hold a question and an answer in two columns: Alpaca files, prompt/completion files."""

    prompt: str = "instruction"
    """Column with the question."""

    input: str | None = "input"
    """Column with the text that the question is about. Rows may lack it, or leave it empty. Null: not read."""

    completion: str = "output"
    """Column with the answer."""

    system: str | None = None
    """Column with a system message. Null: none."""

    style: Literal["alpaca", "plain", "chat"] = "alpaca"
    """`alpaca`: under the headings that Stanford's Alpaca used; `plain`: the answer directly after the question (with
    empty lines between a system message, the question and its input); `chat`: as a conversation, by the chat template."""

    loss: Literal["completion", "all"] = "completion"
    """Tokens that are trained on: the answer including its end token, or every token."""


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
    """Column with the labels, -100 where a token is not trained on. Null: every token is trained on, or those that
    `mask` marks."""

    mask: str | None = None
    """Column with 1 for each token that is trained on and 0 for the others, instead of `labels`."""


Format = Annotated[ChatFormat | InstructionFormat | CompletionFormat | TokensFormat, Field(discriminator="type")]

COLUMNS: dict[str, tuple[list[str], list[str]]] = {
    "chat": (["messages"], ["tools"]),
    "instruction": (["prompt", "completion"], ["input", "system"]),
    "completion": (["text"], []),
    "tokens": (["input_ids"], ["labels", "mask"]),
}
"""By type: the fields that name a column every row must have, and those that name an optional one."""
