"""What a row says and its rendered text does not: it would be lost without a word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raytune_fsdp.data.rows.chat import Conversation
from raytune_fsdp.data.rows.marks import Mark, take_marks
from raytune_fsdp.data.rows.templates import REASONING_KEYS
from raytune_fsdp.data.sources import shorten

# Templates that cut the reasoning out of a content find it by such tags, and some write other tags in their place.
_TAG = re.compile(r"<[^<>\s]+>")


def has_all_contents_in_order(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """A check that costs nothing, for rows of nothing but contents, of which none can be there by chance."""
    place = 0
    for message in messages:
        content = message["content"].strip()
        place = text.find(content, place) + len(content)
        doubtful = 0 < len(content) < 16 and message["role"] not in ("user", "assistant")
        if doubtful or place < len(content) or "tool_calls" in message or not message.keys().isdisjoint(REASONING_KEYS):
            return False
    return True


def lost_content(conversation: Conversation, marked: str, words: Collection[str]) -> str | None:
    """What of the messages is not in their text, which was rendered with marks. `words` are those of the template."""
    text, marks = take_marks(marked)
    seen = Counter((mark.message, mark.kind) for mark in marks)
    knows_reasoning = not set(REASONING_KEYS).isdisjoint(words)
    last = _last_turn(conversation.messages)
    for index, message in enumerate(conversation.messages):
        name = f"{conversation.column}[{index}]"
        if message["content"].strip() and (index, "content") not in seen:
            return f"the content of {name} (role {message['role']})"
        # Two marks are around the name of each call.
        if "tool_calls" in message and seen[index, "tool_calls"] < 2 * len(message["tool_calls"]):
            return f"tool_calls of {name}"
        for key in REASONING_KEYS:
            # A template may drop the reasoning of earlier turns, there as in what it asks the model with.
            may_drop = knows_reasoning and index != last
            if key in message and not may_drop and seen[index, "reasoning_content"] < 2:
                return f"the {key} of {name}"
        if index == last:
            part = _missing_part(message["content"], text[_begin(index, marks) :])
            if part is not None:
                return f"{shorten(repr(part))} in the content of {name}"
    return None


def _last_turn(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The message in which the assistant ends the conversation, if it does."""
    for index in reversed(range(len(messages))):
        if messages[index]["role"] in ("assistant", "user"):
            return index if messages[index]["role"] == "assistant" else None
    return None


def _begin(index: int, marks: Sequence[Mark]) -> int:
    """Behind the last thing in front of the message that is of an earlier one."""
    end = max((mark.at for mark in marks if mark.message == index), default=0)
    return max((mark.at for mark in marks if mark.message < index and mark.at <= end), default=0)


def _missing_part(content: str, text: str) -> str | None:
    """The first part of the content, between its tags, that is not in the text, whatever happened to white space.

    Marks at its ends do not say: a template may cut something out between them, or put the reasoning in front.
    """
    place, text = 0, "".join(text.split())
    for part in _TAG.split(content):
        words = "".join(part.split())
        place = text.find(words, place) + len(words)
        if place < len(words):
            return part.strip()
    return None
