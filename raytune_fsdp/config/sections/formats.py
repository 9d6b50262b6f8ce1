"""`data.*.format`: how a row becomes a document, and which of its tokens are trained on."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.rules import Section, function_name

SYSTEM, FUNCTIONS = "system", "functions"
"""Columns next to a conversation: its system message, and tools under the name that OpenAI first gave them."""

# Fields that several formats have, and what they mean in each.

Unread = Annotated[
    list[str],
    Field(
        description="Names of columns that are left unread on purpose. A run warns of other well-known columns that it "
        "does not read."
    ),
]
RoleKey = Annotated[
    str | None,
    Field(description="Key of a message's role. Null: `role`, or `from` (ShareGPT) where messages have that."),
]
ContentKey = Annotated[
    str | None,
    Field(description="Key of a message's text. Null: `content`, or `value` (ShareGPT) where messages have that."),
]
Roles = Annotated[
    dict[str, Literal["system", "developer", "user", "assistant", "tool"]],
    Field(
        description="What the names of roles in the file mean: system, developer, user, assistant or tool. `human`, "
        "`gpt` and other\ncommon names need no entry."
    ),
]
SystemColumn = Annotated[str | None, Field(description="Column with a system message. Null: none.")]
ToolsColumn = Annotated[
    str | None,
    Field(
        description="Column with the tools that the assistant may call. Rows without it are fine. Null: the column is "
        "not read."
    ),
]
WeightColumn = Annotated[
    str | None, Field(description="Column with a number, at least 0: the weight of the row's loss. Null: 1.")
]
OfAnswer = Annotated[
    Literal["completion", "all"],
    Field(description="Tokens that are trained on: the answer including its end token, or every token."),
]


class ChatFormat(Section):
    type: Literal["chat"] = "chat"
    """Rows hold a conversation: a list of messages, each with a role and a content, rendered by the chat template."""

    messages: str = "messages"
    """Column with the list of messages. ShareGPT files call it `conversations`."""

    prompt: str | None = None
    """Column with a list of messages that come before these and are only context, except with `loss: all`. TRL's rows have
    `prompt` and `completion`: `{prompt: prompt, messages: completion}`. Null: none."""

    role: RoleKey = None
    content: ContentKey = None
    roles: Roles = Field(default_factory=dict)

    tools: str | None = "tools"
    """Column with the tools that the assistant may call: a list of JSON schemas, or that list as JSON text. Rows
    without it are fine, and may have OpenAI's older `functions` instead. Null: neither is read."""

    system: str | None = SYSTEM
    """Column with a system message, which becomes the first message. Rows without it, or where it is empty, are fine.
    Null: the column is not read."""

    loss: Literal["assistant", "last_turn", "all"] = "assistant"
    """Tokens that are trained on: all turns of the assistant, its last turn, or every token. A message with
    `"train": false`, `"training": false` or `"weight": 0` is never trained on."""

    reasoning: Literal["template", "keep", "drop"] = "template"
    """What happens to the reasoning of the assistant's messages. `template`: what the chat template does, many of which
    leave it out of earlier turns; `keep`: a row is a bad row if the template leaves out any of it; `drop`: it is taken out
    of all messages, also between `<think>` and `</think>` (or `[THINK]` and `[/THINK]`) at the start of their content.
    Without an opening tag before it, `</think>` counts only on a line of its own."""

    ignore: Unread = Field(default_factory=list)


class InstructionFormat(Section):
    type: Literal["instruction"]
    """Rows hold a question and an answer in two columns: Alpaca files, prompt/completion files."""

    prompt: str = "instruction"
    """Column with the question."""

    input: str | None = "input"
    """Column with the text that the question is about. Rows may lack it, or leave it empty. Null: the column is not read."""

    completion: str = "output"
    """Column with the answer."""

    system: SystemColumn = None

    style: Literal["alpaca", "plain", "chat"] = "alpaca"
    """`alpaca`: under the headings that Stanford's Alpaca used; `plain`: the answer directly after the question (with
    empty lines between a system message, the question and its input); `chat`: as a conversation, rendered by the chat
    template."""

    loss: OfAnswer = "completion"

    ignore: Unread = Field(default_factory=list)


class CompletionFormat(Section):
    type: Literal["completion"]
    """Rows hold plain text; every token is trained on."""

    text: str = "text"
    """Column with the text."""

    ignore: Unread = Field(default_factory=list)


class TokensFormat(Section):
    type: Literal["tokens"]
    """Rows are tokenized already."""

    input_ids: str = "input_ids"
    """Column with the token ids."""

    labels: str | None = "labels"
    """Column with the labels, -100 where a token is not trained on. Null: every token is trained on, or the tokens that
    `mask` marks."""

    mask: str | None = None
    """Column with 1 for each token that is trained on and 0 for the others, instead of `labels`."""

    ignore: Unread = Field(default_factory=list)


def parts_of(template: str) -> list[tuple[str, str | None]]:
    """Return the parts of a template: a text, and the column whose value follows it; None after the last text.

    `{name}` stands for the column called `name`, whatever is in the name; `{{` and `}}` stand for braces. Raises
    ValueError.
    """
    parts: list[tuple[str, str | None]] = []
    text = ""
    for match in re.finditer(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+", template):
        piece = match.group()
        if piece in ("{", "}"):
            raise ValueError(f"{template!r} has a single {piece}; write {2 * piece} where the text has one")
        if match.group(1) is not None:
            if not match.group(1):
                raise ValueError(f"{template!r} has {{}} without a name; write a column's name between the braces")
            parts.append((text, match.group(1)))
            text = ""
        else:
            text += piece[0] if piece in ("{{", "}}") else piece
    return [*parts, (text, None)]


class TemplateFormat(Section):
    type: Literal["template"]
    """Rows have columns of any names, whose values are put into texts. `{name}` stands for the column `name`; `{{` and
    `}}` stand for braces."""

    prompt: str
    """The text before the answer, such as `"Question: {question} Answer: "`, where `{question}` stands for the column
    `question`, and `{{` for a brace."""

    completion: str
    """The answer, such as `"{answer}"`."""

    style: Literal["plain", "chat"] = "plain"
    """`plain`: the answer directly after the prompt; `chat`: as a question of the user and an answer of the assistant,
    rendered by the chat template."""

    loss: OfAnswer = "completion"

    ignore: Unread = Field(default_factory=list)

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        parts_of(self.prompt)
        if len(parts_of(self.completion)) < 2:
            raise ValueError(
                f"completion={self.completion!r} names no column, so every row would have this answer; write {{name}} "
                "for the value of a column"
            )
        return self


class PreferenceFormat(Section):
    type: Literal["preference"]
    """Rows hold two answers to one prompt, of which one is preferred: texts, or lists of messages. Rows without a prompt
    have whole conversations as answers: their prompt is the first messages that both have."""

    prompt: str | None = "prompt"
    """Column with the prompt: a text, or a list of messages. Rows may lack it if their answers are whole conversations.
    Null: the column is not read."""

    chosen: str = "chosen"
    """Column with the preferred answer: a text, a message, or a list of messages, with or without those of the prompt."""

    rejected: str = "rejected"
    """Column with the other answer, of the same kind."""

    role: RoleKey = None
    content: ContentKey = None
    roles: Roles = Field(default_factory=dict)

    system: SystemColumn = None

    tools: ToolsColumn = "tools"

    margin: str | None = None
    """Column with a number: how far apart the answers are to be, which `train.objective` takes off the difference of
    their rewards. Null: 0."""

    weight: WeightColumn = None

    style: Literal["chat", "plain"] = "chat"
    """How texts are read. `chat`: as a question of the user and answers of the assistant; `plain`: the answer directly
    after the prompt, without a template. Messages need `chat`."""

    loss: Literal["completion", "assistant"] = "completion"
    """Tokens whose probabilities count: those of the answer, after what both answers share, or all turns of the assistant.
    Where a template writes an empty thought in front of one answer only, that counts as the answer's, too."""

    ignore: Unread = Field(default_factory=list)


class BinaryFormat(Section):
    type: Literal["binary"]
    """Rows hold a prompt, an answer, and whether the answer is desirable: KTO's files."""

    prompt: str | None = "prompt"
    """Column with the prompt: a text, or a list of messages. Null: the answers are whole conversations."""

    completion: str = "completion"
    """Column with the answer: a text, a message, or a list of messages."""

    label: str = "label"
    """Column with true (or 1) for a desirable answer, and false (or 0) for another."""

    role: RoleKey = None
    content: ContentKey = None
    roles: Roles = Field(default_factory=dict)

    system: SystemColumn = None

    tools: ToolsColumn = "tools"

    weight: WeightColumn = None

    style: Literal["chat", "plain"] = "chat"
    """How texts are read. `chat`: as a question of the user and an answer of the assistant; `plain`: the answer directly
    after the prompt, without a template. Messages need `chat`."""

    ignore: Unread = Field(default_factory=list)


class ScoreFormat(Section):
    type: Literal["score"]
    """Rows hold a text or a conversation, and its class or score."""

    text: str | None = None
    """Column with a text, which is tokenized as it is."""

    messages: str | None = None
    """Column with a conversation, a list of messages, rendered by the chat template."""

    label: str | None = None
    """Column with the class: one of `model.head.labels`, or its number."""

    score: str | None = None
    """Column with a number."""

    role: RoleKey = None
    content: ContentKey = None
    roles: Roles = Field(default_factory=dict)

    weight: WeightColumn = None

    ignore: Unread = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for one, other in (("text", "messages"), ("label", "score")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(
                    f"{one}={getattr(self, one)} and {other}={getattr(self, other)}: name the column of exactly one of the "
                    "two"
                )
        return self


Returned = Annotated[
    ChatFormat
    | InstructionFormat
    | CompletionFormat
    | TokensFormat
    | TemplateFormat
    | PreferenceFormat
    | BinaryFormat
    | ScoreFormat,
    Field(discriminator="type"),
]


class PythonFormat(Section):
    type: Literal["python"]
    """A function of yours turns rows into other rows, which are read in another format."""

    function: Annotated[str, AfterValidator(function_name)]
    """`module:function`. The function takes a row (a dict) and returns one. The module must be importable wherever data
    is read. Its file, and the files of your own modules that it imports, belong to the run: a changed one is refused."""

    then: Returned = Field(default_factory=ChatFormat)
    """The format of the rows that the function returns. Default: a conversation in `messages`."""


Format = Annotated[
    ChatFormat
    | InstructionFormat
    | CompletionFormat
    | TokensFormat
    | TemplateFormat
    | PreferenceFormat
    | BinaryFormat
    | ScoreFormat
    | PythonFormat,
    Field(discriminator="type"),
]


def groups_of(format: Format) -> str | None:
    """Return the kind of groups that rows of this format make: preference, binary, or score, of one document each; None:
    a loss is told nothing of them."""
    returned = format.then if isinstance(format, PythonFormat) else format
    return returned.type if isinstance(returned, PreferenceFormat | BinaryFormat | ScoreFormat) else None


def becomes_chat(format: Format) -> bool:
    """Return whether rows of this format become conversations, which a chat template renders."""
    returned = format.then if isinstance(format, PythonFormat) else format
    return (
        isinstance(returned, ChatFormat)
        or getattr(returned, "style", None) == "chat"
        or (isinstance(returned, ScoreFormat) and returned.messages is not None)
    )


COLUMNS: dict[str, tuple[list[str], list[str]]] = {
    "chat": (["messages", "prompt"], ["tools", "system"]),
    "instruction": (["prompt", "completion"], ["input", "system"]),
    "completion": (["text"], []),
    "tokens": (["input_ids"], ["labels", "mask"]),
    "preference": (["chosen", "rejected"], ["prompt", "system", "tools", "margin", "weight"]),
    "binary": (["completion", "label"], ["prompt", "system", "tools", "weight"]),
    "score": (["text", "messages", "label", "score"], ["weight"]),
}
"""For each type: the fields that name a column every row must have, and those that name an optional one."""


def needed_columns(format: Format) -> tuple[str, ...] | None:
    """Return the columns that every row must have; None: whatever the user's function reads."""
    if isinstance(format, PythonFormat):
        return None
    if isinstance(format, TemplateFormat):
        parts = (*parts_of(format.prompt), *parts_of(format.completion))
        return tuple(dict.fromkeys(name for _, name in parts if name is not None))
    named = (getattr(format, field) for field in COLUMNS[format.type][0])
    return tuple(name for name in named if name is not None)
