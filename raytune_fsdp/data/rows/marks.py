"""Marks: private-use characters around the texts of messages, which show where a template puts each message.

There is one character for each message and kind of text, from U+F0000 to U+FFFFD: enough for 21,844 messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raytune_fsdp.data.rows.templates import REASONING_KEYS

_FIRST = 0xF0000
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_KINDS = ("content", "tool_calls", "reasoning_content")
_NOWHERE = 1 << 62


class Mark(NamedTuple):
    """A mark before character `at` of the text: the start or the end of a part of a message."""

    at: int
    message: int
    kind: str


def has_marks(text: str) -> bool:
    """Return whether the text has such characters already."""
    return _MARK.search(text) is not None


def with_marks(message: Mapping[str, Any], index: int, *, by_id: bool = False) -> dict[str, Any]:
    """Return the message with marks around its content, its reasoning and the names of the functions it calls.

    `by_id`: around the ids of the calls instead of these names.
    """
    content, calls, reasoning = (chr(_FIRST + index * len(_KINDS) + kind) for kind in range(len(_KINDS)))
    marked = {**message, "content": _between(message["content"], content)}
    for key in REASONING_KEYS:
        if key in message:
            marked[key] = _between(message[key], reasoning)
    if "tool_calls" in message:
        marked["tool_calls"] = [_marked_call(call, calls, by_id) for call in message["tool_calls"]]
    return marked


def _marked_call(call: Mapping[str, Any], mark: str, by_id: bool) -> dict[str, Any]:
    if by_id and isinstance(call.get("id"), str):
        return {**call, "id": _between(call["id"], mark)}
    return {**call, "function": {**call["function"], "name": _between(call["function"]["name"], mark)}}


def with_arguments_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def take_marks(marked: str) -> tuple[str, list[Mark]]:
    """Return the text without marks, and the marks in order."""
    pieces = _MARK.split(marked)
    marks, at = [], 0
    for count, piece in enumerate(pieces[:-1]):
        at += len(piece)
        marks.append(Mark(at, *_meaning(marked[at + count])))
    return "".join(pieces), marks


def after_last_mark(marked: str) -> tuple[str, tuple[int, str] | None]:
    """Return the text after the last mark, and that mark's message and kind: None if there are no marks."""
    # Searched from the end: this text is short, and there is a rendering for each turn of the assistant.
    for at in range(len(marked) - 1, -1, -1):
        if "\U000f0000" <= marked[at] <= "\U000ffffd":
            return marked[at + 1 :], _meaning(marked[at])
    return marked, None


def kinds_in(marked: str) -> set[str]:
    """Return the kinds of the marks in a text."""
    return {_meaning(mark)[1] for mark in set(_MARK.findall(marked))}


def messages_between(marked: str, start: int, end: int) -> set[int]:
    """Return the messages that have a mark in this part of the text."""
    return {(ord(mark) - _FIRST) // len(_KINDS) for mark in _MARK.findall(marked, start, end)}


def _meaning(mark: str) -> tuple[int, str]:
    message, kind = divmod(ord(mark) - _FIRST, len(_KINDS))
    return message, _KINDS[kind]


def _between(text: str, mark: str) -> str:
    """Mark the text inside its surrounding white space, which templates may strip."""
    inner = text.strip()
    # Not at the ends of the text: a template that strips it would find no white space there, and render other text.
    return text.replace(inner, f"{mark}{inner}{mark}", 1) if inner else text


class Places:
    """Where the messages of a conversation are in its text, by their marks."""

    def __init__(self, marks: Sequence[Mark], names: Sequence[int]) -> None:
        """`names`: how many marks at names of functions belong to each message; any after them are in later ones."""
        many = len(names)
        self.final = marks[-1].message if marks else None
        """The message with the last mark."""
        self._first, self._last = [_NOWHERE] * many, [-1] * many
        self._kind = [""] * many
        self._before: list[Mark | None] = [None] * (many + 1)
        seen = [0] * many
        placed = [-1] * many
        for place, mark in enumerate(marks):
            index = mark.message
            placed[index] = place
            if mark.kind == "tool_calls":
                seen[index] += 1
                if seen[index] > names[index]:
                    continue
            self._first[index] = min(self._first[index], mark.at)
            if mark.at >= self._last[index]:
                self._last[index], self._kind[index] = mark.at, mark.kind
        last = -1
        self._highest, self._lowest = [-1] * (many + 1), [_NOWHERE] * (many + 1)
        for index in range(many):
            last = max(last, placed[index])
            self._before[index + 1] = marks[last] if last >= 0 else None
            self._highest[index + 1] = max(self._highest[index], self._last[index])
        for index in reversed(range(many)):
            self._lowest[index] = min(self._lowest[index + 1], self._first[index])

    def of(self, index: int) -> tuple[int, int, str] | None:
        """Return where the first and the last mark of a message are, and the kind of the last; None without marks."""
        last = self._last[index]
        return None if last < 0 else (self._first[index], last, self._kind[index])

    def before(self, index: int) -> Mark | None:
        """Return the last mark of all messages before this one."""
        return self._before[index]

    def is_apart(self, index: int) -> bool:
        """Return whether all messages before this one end before it begins, and those after it begin after it ends."""
        return self._highest[index] <= self._first[index] and self._last[index] <= self._lowest[index + 1]

    def after(self, index: int) -> int | None:
        """Return where the first mark of all messages after this one is; None if there is none."""
        lowest = self._lowest[index + 1]
        return None if lowest == _NOWHERE else lowest
