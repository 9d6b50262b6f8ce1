"""Private-use characters put around the texts of messages: they show where a template puts each message.

One character for each message and kind of text, from U+F0000 to U+FFFFD: enough for 21,844 messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from raytune_fsdp.data.rows.templates import REASONING_KEYS

_FIRST = 0xF0000
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_KINDS = ("content", "tool_calls", "reasoning_content")


class Mark(NamedTuple):
    """A mark before character `at` of the text: the start or the end of a part of a message."""

    at: int
    message: int
    kind: str


def has_marks(text: str) -> bool:
    """Whether the text has such characters already."""
    return _MARK.search(text) is not None


def with_marks(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message with marks around its content, its reasoning and the names of the functions it calls."""
    content, calls, reasoning = (chr(_FIRST + index * len(_KINDS) + kind) for kind in range(len(_KINDS)))
    marked = {**message, "content": _between(message["content"], content)}
    for key in REASONING_KEYS:
        if key in message:
            marked[key] = _between(message[key], reasoning)
    if "tool_calls" in message:
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": _between(call["function"]["name"], calls)}}
            for call in message["tool_calls"]
        ]
    return marked


def take_marks(marked: str) -> tuple[str, list[Mark]]:
    """The text without marks, and the marks in order."""
    pieces = _MARK.split(marked)
    marks, at = [], 0
    for count, piece in enumerate(pieces[:-1]):
        at += len(piece)
        marks.append(Mark(at, *_meaning(marked[at + count])))
    return "".join(pieces), marks


def after_last_mark(marked: str) -> tuple[str, tuple[int, str] | None]:
    """The text after the last mark, and that mark's message and kind: None if there are no marks."""
    # From the end: this text is short, and there is a rendering for each turn of the assistant.
    for at in range(len(marked) - 1, -1, -1):
        if "\U000f0000" <= marked[at] <= "\U000ffffd":
            return marked[at + 1 :], _meaning(marked[at])
    return marked, None


def messages_between(marked: str, start: int, end: int) -> set[int]:
    """The messages that have a mark in this part of the text."""
    return {(ord(mark) - _FIRST) // len(_KINDS) for mark in _MARK.findall(marked, start, end)}


def _meaning(mark: str) -> tuple[int, str]:
    message, kind = divmod(ord(mark) - _FIRST, len(_KINDS))
    return message, _KINDS[kind]


def _between(text: str, mark: str) -> str:
    """Mark the text inside its surrounding white space, which templates may strip."""
    inner = text.strip()
    # Not at the ends of the text: a template that strips it would find no white space there, and render another text.
    return text.replace(inner, f"{mark}{inner}{mark}", 1) if inner else text
