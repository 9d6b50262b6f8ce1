"""Rows with several answers to one prompt, of which one is preferred, or with one that is judged (KTO).

A row becomes a `Answers`: a prompt and its answers. A side is the prompt with one of the answers, rendered as any other
row. A prompt is what a column says, or else what whole conversations have in common: their first messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.batch import IGNORE, Role
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config.sections.formats import BinaryFormat, ChatFormat, PreferenceFormat, ScoreFormat
from raytune_fsdp.data.mixture import FIFTH_ORDER
from raytune_fsdp.data.rows.conversation import (
    SYSTEM_ROLES,
    Conversation,
    check_text,
    messages_in,
    read_column,
    read_conversation,
)
from raytune_fsdp.data.rows.numbers import read_number, read_weight
from raytune_fsdp.data.sources.source import JsonText, shorten

if TYPE_CHECKING:
    from raytune_fsdp.data.rows.formats import Document

GroupFormat = PreferenceFormat | BinaryFormat

_OPENING = (*SYSTEM_ROLES, "user")
"""Roles of a first message that begins a conversation; an answer to a prompt begins with another one."""
_ASSISTANT = "\n\nAssistant:"
"""What ends the prompt in the texts of Anthropic's HH-RLHF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(Conversation):
    """A prompt and one of its answers as messages."""

    answer: int = 0
    """Place of the answer's first message in `messages`."""
    answers: str = ""
    """Column of the answer."""
    skipped: int = 0
    """How many messages of that column belong to the prompt."""

    @property
    def begins_trained(self) -> bool:
        """Whether the answer begins with a turn that is trained on."""
        return self.train[self.answer] and self.messages[self.answer]["role"] == "assistant"

    def place(self, index: int) -> str:
        if index >= self.answer:
            return f"{self.answers}[{index - self.answer + self.skipped}]"
        return Conversation.place(self, index)


@dataclass(frozen=True, slots=True)
class Texts:
    """A prompt and one of its answers as texts, which follow one another."""

    prompt: str
    answer: str


Side = Turns | Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A prompt and its answers, as a row has them."""

    sides: tuple[Side, ...]
    columns: tuple[str, ...]
    """The column of each side's answer."""
    roles: tuple[Role, ...]
    weight: float
    margin: float

    def with_answer_of(self, other: Answers) -> Side:
        """Return the prompt of this group with the first answer of another one."""
        own, theirs = self.sides[0], other.sides[0]
        if isinstance(own, Texts) or isinstance(theirs, Texts):
            assert isinstance(own, Texts) and isinstance(theirs, Texts), "one format makes all sides"
            return replace(own, answer=theirs.answer)
        return replace(
            own,
            messages=[*own.messages[: own.answer], *theirs.messages[theirs.answer :]],
            train=[*own.train[: own.answer], *theirs.train[theirs.answer :]],
            skipped=theirs.skipped,
        )


def read_group(
    row: dict[str, Any], format: GroupFormat, where: str, *, columnar: bool = False, order: int = FIFTH_ORDER
) -> Answers:
    """Return the prompt and the answers of a row. Raises RowError. `columnar`, `order`: see `read_conversation`."""
    fields = ("chosen", "rejected") if isinstance(format, PreferenceFormat) else ("completion",)
    columns = tuple(getattr(format, field) for field in fields)
    for column, field in zip(columns, fields, strict=True):
        read_column(row, column, field, where)
    if format.style != "plain":
        row = row | {
            name: messages_in(row[name], format.role, format.roles)
            for name in (*columns, format.prompt or "")
            if isinstance(row.get(name), JsonText)
        }
    margin = getattr(format, "margin", None)
    roles: tuple[Role, ...] = (Role.CHOSEN, Role.REJECTED)
    if isinstance(format, BinaryFormat):
        roles = (Role.DESIRABLE if _label(row, format.label, where) else Role.UNDESIRABLE,)
    weight = read_weight(row, format.weight, where)
    return Answers(
        sides=_texts(row, format, columns, where) if format.style == "plain" else _Messages(
            row, format, columns, where, columnar=columnar, order=max(order, FIFTH_ORDER)
        ).sides(),
        columns=columns,
        roles=roles,
        weight=weight,
        margin=0.0 if margin is None else read_number(row, margin, where, "format.margin"),
    )  # fmt: skip


_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _label(row: dict[str, Any], column: str, where: str) -> bool:
    value = read_column(row, column, "label", where)
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    # In CSV files all values are texts, and pandas writes 1.0 for true in a column that has an empty place.
    if isinstance(value, str) and value.strip().lower() in _LABELS:
        return _LABELS[value.strip().lower()]
    raise RowError(
        f"{where}: {column}={shorten(repr(value))} is neither true (or 1) nor false (or 0), which say whether the "
        "answer is desirable; correct or remove the row, or name another column in the dataset's format.label",
        "wrong_type",
    )


def _prompt_of(row: dict[str, Any], format: GroupFormat) -> Any:
    """Return what the column of the prompt has; None: nothing."""
    given = None if format.prompt is None else row.get(format.prompt)
    empty = given in (None, [], {}) or (isinstance(given, str) and not given.strip())
    empty = empty or (isinstance(given, JsonText) and given in ("[]", "{}"))
    return None if empty else given


# Texts, directly after one another.


def _texts(row: dict[str, Any], format: GroupFormat, columns: Sequence[str], where: str) -> tuple[Side, ...]:
    answers = [_text(row[column], f"{where}: {column}") for column in columns]
    tools = None if format.tools is None else row.get(format.tools)
    if (tools.strip() if isinstance(tools, str) else tools) not in (None, [], {}, "", "[]", "null"):
        raise RowError(
            f"{where}: {format.tools}={shorten(repr(tools))}: format.style=plain has no place for tools; set the "
            "dataset's format.tools to null, or format.style to chat",
            "wrong_type",
        )
    given = _prompt_of(row, format)
    if given is None:
        prompt = _shared_text(answers, columns, where)
        answers = [answer[len(prompt) :] for answer in answers]
    else:
        prompt = _text(given, f"{where}: {format.prompt}")
    system = None if format.system is None else row.get(format.system)
    if system is not None and str(system).strip():
        prompt = f"{_text(system, f'{where}: {format.system}')}\n\n{prompt}"
    return tuple(Texts(prompt, answer) for answer in answers)


def _text(value: Any, place: str) -> str:
    if isinstance(value, list | dict):
        raise RowError(
            f"{place}={shorten(value)} is not text, and format.style=plain reads texts; set the dataset's format.style "
            "to chat, which reads messages, or correct the row",
            "wrong_type",
        )
    return check_text(value, place)


def _shared_text(answers: Sequence[str], columns: Sequence[str], where: str) -> str:
    """Return the prompt that both answers begin with: up to where the assistant speaks, or else the last whole word."""
    prefix = commonprefix(list(answers))
    end = prefix.rfind(_ASSISTANT)
    if end >= 0:
        end += len(_ASSISTANT)
    elif len(answers) > 1:
        # Where both go on with a word of their own, the space in front is the answer's.
        end = max((at for at, character in enumerate(prefix) if character.isspace()), default=0)
        end = len(prefix[:end].rstrip())
    if end <= 0:
        why = "have no first words in common" if len(columns) > 1 else "is all that it has"
        raise RowError(
            f"{where}: has no prompt: {' and '.join(columns)} {why}; "
            "name the column of the prompt in the dataset's format.prompt, or correct or remove the row",
            "no_prompt",
        )
    for answer, column in zip(answers, columns, strict=True):
        if not answer[end:].strip():
            raise RowError(
                f"{where}: {column} has nothing after the prompt, which is what both answers begin with; correct or "
                "remove the row",
                "no_targets",
            )
    return prefix[:end]


# Messages, which a chat template renders.


def format_of(
    column: str, format: GroupFormat | ScoreFormat, tools: str | None = None, system: str | None = None
) -> ChatFormat:
    """Return how the messages of a column are read; `tools`, `system`: other columns that are read with them."""
    return _chat_format(column, format.role, format.content, tuple(format.roles.items()), tools, system)


@lru_cache(maxsize=64)
def _chat_format(
    column: str,
    role: str | None,
    content: str | None,
    roles: tuple[tuple[str, Any], ...],
    tools: str | None,
    system: str | None,
) -> ChatFormat:
    """Return how the messages of a column are read; each is made once."""
    return ChatFormat(messages=column, role=role, content=content, roles=dict(roles), tools=tools, system=system)


@dataclass(frozen=True, slots=True)
class _Read:
    """The messages of a column, as they are in the row and as templates expect them."""

    column: str
    given: list[Any]
    messages: list[dict[str, Any]]
    train: list[bool]

    @property
    def is_whole(self) -> bool:
        """Whether it is a conversation from its beginning."""
        return self.messages[0]["role"] in _OPENING

    @property
    def words(self) -> list[Any]:
        return [each["content"] for each in self.messages]


class _Messages:
    """Reads the messages of one row."""

    def __init__(
        self,
        row: dict[str, Any],
        format: GroupFormat,
        columns: Sequence[str],
        where: str,
        *,
        columnar: bool,
        order: int,
    ) -> None:
        self._row, self._format, self._where = row, format, where
        self._options: dict[str, Any] = {"columnar": columnar, "order": order}
        self._given = _prompt_of(row, format)
        self._answers = [self._read(column, row[column], "assistant") for column in columns]

    def sides(self) -> tuple[Side, ...]:
        """Return the prompt with each of the answers. Raises RowError."""
        answers, given = self._answers, self._given
        if given is None or (isinstance(given, str) and all(each.is_whole for each in answers)):
            many = self._shared()
            self._check_said(given, answers[0].words[:many])
            prompt, skipped = answers[0].given[:many], [many] * len(answers)
            return self._sides(answers[0].column, prompt, skipped)
        column = str(self._format.prompt)
        asked = self._read(column, given, "user")
        found = [self._skipped(each, asked) for each in answers]
        ahead = {tuple(map(str, each.messages[: at - len(asked.messages)])) for each, at in found if at}
        if len(ahead) > 1 or (any(ahead) and not all(at for _, at in found)):
            raise self._error("begin with different system messages; correct or remove the row", "wrong_prompt")
        if any(ahead):
            each, at = found[0]
            return self._sides(each.column, each.given[:at], [at for _, at in found])
        return self._sides(column, asked.given, [at for _, at in found])

    def _read(self, column: str, given: Any, role: str) -> _Read:
        """Return the messages of a column; a text is one message of this role, as the file would have it."""
        place = f"{self._where}: {column}"
        if isinstance(given, str):
            named = next((name for name, meaning in self._format.roles.items() if meaning == role), role)
            text = check_text(given, place)
            given = [{self._format.role or "role": named, self._format.content or "content": text}]
        elif isinstance(given, dict):
            given = [given]
        elif not isinstance(given, list):
            raise RowError(
                f"{place}={shorten(given)} is neither a text nor a list of messages; correct or remove the row",
                "wrong_type",
            )
        found = read_conversation({column: given}, format_of(column, self._format), self._where, **self._options)
        return _Read(column, given, found.messages, found.train)

    def _shared(self) -> int:
        """Return how many messages whole conversations have in common: all before the answer."""
        columns = [each.column for each in self._answers]
        apart = [each.column for each in self._answers if not each.is_whole]
        if apart:
            shown = "a text" if isinstance(self._row[apart[0]], str) else "an answer alone"
            wanted = "the column of the prompt" if self._format.prompt is None else "another column"
            raise self._error(
                f"{apart[0]} is {shown}, and the row has no prompt; name {wanted} in the dataset's format.prompt"
                + ("" if shown != "a text" else ", or set format.style to plain if the text has the prompt, too"),
                "no_prompt",
                columns=(),
            )
        messages = [each.messages for each in self._answers]
        if len(messages) == 1:
            # All before the assistant's last turn.
            last = [number for number, each in enumerate(messages[0]) if each["role"] == "assistant"]
            many = last[-1] if last else len(messages[0])
        else:
            pairs = zip(*messages, strict=False)
            many = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not many:
            raise self._error(
                "begin with different messages, so there is no prompt; correct or remove the row, or name the column "
                "of the prompt in the dataset's format.prompt",
                "wrong_prompt",
            )
        if len(columns) > 1 and all(len(each) == many for each in messages):
            raise self._error("are equal, so neither is to be preferred; correct or remove the row", "equal_answers")
        for each in self._answers:
            self._check_left(each, many)
        return many

    def _check_left(self, read: _Read, many: int) -> None:
        if len(read.messages) <= many:
            raise self._error(
                f"{read.column} has no message after the prompt ({many} message(s)); correct or remove the row",
                "no_targets",
                columns=(),
            )

    def _check_said(self, given: Any, words: Sequence[Any]) -> None:
        """Refuse a prompt that the conversations do not have."""
        if given is None or str(given).strip() in (str(each).strip() for each in words):
            return
        raise self._error(
            f"begin with other messages than the prompt ({self._format.prompt}={shorten(repr(given))}); correct or "
            "remove the row, or set the dataset's format.prompt to null if the column is something else",
            "wrong_prompt",
        )

    def _skipped(self, read: _Read, asked: _Read) -> tuple[_Read, int]:
        """Return how many messages of an answer are those of the prompt."""
        if not read.is_whole:
            return read, 0
        own = read.messages
        first = int(own[0]["role"] in SYSTEM_ROLES and asked.messages[0]["role"] not in SYSTEM_ROLES)
        end = first + len(asked.messages)
        if own[first:end] != asked.messages:
            wanted, begins = (
                shorten(repr(each["content"])) for each in (asked.messages[0], own[min(first, len(own) - 1)])
            )
            raise self._error(
                f"{read.column} begins with {begins} and not "
                f"with the messages of {asked.column} ({wanted}); correct or remove the "
                "row, or set the dataset's format.prompt to null: then the prompt is what the answers have in common",
                "wrong_prompt",
                columns=(),
            )
        self._check_left(read, end)
        return read, end

    def _sides(self, column: str, prompt: list[Any], skipped: Sequence[int]) -> tuple[Side, ...]:
        row = {**self._row, column: prompt}
        format = format_of(column, self._format, self._format.tools, self._format.system)
        asked = read_conversation(row, format, self._where, **self._options)
        counts = getattr(self._format, "loss", "completion") == "assistant"
        train = asked.train if counts else [False] * len(asked.train)
        return tuple(
            Turns(
                messages=[*asked.messages, *each.messages[many:]],
                train=[*train, *each.train[many:]],
                tools=asked.tools,
                where=f"{self._where}: {each.column}",
                column=column,
                first=asked.first,
                answer=len(asked.messages),
                answers=each.column,
                skipped=many,
            )
            for each, many in zip(self._answers, skipped, strict=True)
        )

    def _error(self, what: str, reason: str, *, columns: Sequence[str] | None = None) -> RowError:
        named = [each.column for each in self._answers] if columns is None else columns
        return RowError(f"{self._where}: {' and '.join(named)}{' ' if named else ''}{what}", reason)


# The documents of the sides become a group.


def joined(answers: Answers, documents: Sequence[Document], where: str, *, over_all: bool) -> Document | RowError:
    """Return the first document of a group with the others, or what is wrong with them.

    `over_all`: whether all tokens of a chosen document are targets.
    """
    turns = _turns_of(answers.sides[0])
    first, *others = _from_parting(answers.sides, documents, turns)
    if others and np.array_equal(trained_tokens(first), trained_tokens(others[0])):
        return RowError(
            f"{where}: {' and '.join(answers.columns)} have the same {first.target_tokens} trained token(s), so "
            "neither is to be preferred; correct or remove the row",
            "equal_answers",
        )
    shared = shared_of((first, *others), turns=turns)
    skipped = 0
    if over_all:
        widened = _over_all(first, where)
        if isinstance(widened, RowError):
            return widened
        first, skipped = widened
    told = answers.weight, answers.margin
    members = [
        replace(each, columns=(float(role), *told, float(skipped if not number else 0)))
        for number, (role, each) in enumerate(zip(answers.roles, (first, *others), strict=True))
    ]
    return replace(members[0], others=tuple(members[1:]), shared=shared)


def mismatched(document: Document, answers: Answers) -> Document:
    """Return this document as the one that follows a judged answer."""
    return replace(document, columns=(float(Role.MISMATCHED), answers.weight, answers.margin, 0.0))


def trained_tokens(document: Document) -> Any:
    """Return the targets of a document."""
    labels = document.labels[1:]
    return labels[labels != IGNORE]


def shared_of(documents: Sequence[Document], *, turns: int = 0) -> int:
    """Return how many tokens at the start these documents have in common, without a target of an answer.

    One is left in front of the answer's first target, which it predicts. `turns`: how many turns of the prompt are
    targets, too.
    """
    return max(0, min(_parting(documents), *(_answer_in(each, turns) for each in documents)) - 1)


def _from_parting(sides: Sequence[Side], documents: Sequence[Document], turns: int) -> Sequence[Document]:
    """Return the documents with all tokens of their answers as targets from where they part.

    A template may write an empty thought in front of one answer, and not of the other, which has its own: they answer
    the same prompt only if that counts. `turns`: as in `shared_of`.
    """
    if len(documents) == 1 or not all(isinstance(each, Turns) and each.begins_trained for each in sides):
        return documents
    places = [_answer_in(each, turns) for each in documents]
    start = min(_parting(documents), *places)
    before = {int(each.input_ids[place - 1]) for each, place in zip(documents, places, strict=True)}
    if start < min(places) and len(before) == 1:
        return documents  # what differs is further ahead: a message of the prompt, which never counts
    found = []
    for each, place in zip(documents, places, strict=True):
        labels = each.labels.copy()
        labels[start:place] = each.input_ids[start:place]
        found.append(replace(each, labels=labels))
    return found


def _turns_of(side: Side) -> int:
    """Return how many turns of the prompt are trained on."""
    if isinstance(side, Texts):
        return 0
    asked = zip(side.messages[: side.answer], side.train, strict=False)
    return sum(train and message["role"] == "assistant" for message, train in asked)


def _parting(documents: Sequence[Document]) -> int:
    """Return the place of the first token that is not the same in all documents."""
    least = min(len(each.input_ids) for each in documents)
    same = np.ones(least, dtype=np.bool_)
    for each in documents[1:]:
        same &= each.input_ids[:least] == documents[0].input_ids[:least]
    return least if same.all() else int(np.argmin(same))


def _answer_in(document: Document, turns: int) -> int:
    """Return the place of the answer's first target: that of the first run of targets behind the prompt's turns."""
    trained = np.concatenate([[False], document.labels[1:] != IGNORE])
    begins = np.flatnonzero(trained[1:] & ~trained[:-1]) + 1
    return int(begins[turns]) if turns < len(begins) else len(trained)


def _over_all(document: Document, where: str) -> tuple[Document, int] | RowError:
    """Return the document with all tokens up to its answer's end as targets, and how many are not the answer's."""
    places = np.flatnonzero(document.labels[1:] != IGNORE) + 1
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 != len(places):
        return RowError(
            f"{where}: the chosen answer is in several pieces (with other turns in between), and "
            "train.objective.sft.over=all needs it in one; set that to answer, or correct or remove the row",
            "several_turns",
        )
    labels = document.input_ids.copy()
    labels[last + 1 :] = IGNORE  # what a template writes behind the turn
    return replace(document, labels=labels), first - 1
