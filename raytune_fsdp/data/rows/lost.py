"""Find content of a row that is missing from its rendered text: without this check it would be lost silently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raytune_fsdp.data.rows.conversation import Conversation
from raytune_fsdp.data.rows.marks import Mark, take_marks
from raytune_fsdp.data.rows.templates import REASONING_KEYS
from raytune_fsdp.data.sources.source import shorten

# Templates that cut the reasoning out of a message's content look for tags like <think>, and some write other tags in
# their place. So only the parts between tags can be expected in the text.
_TAG = re.compile(r"<[^<>\s]+>")


def has_all_contents_in_order(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Check quickly, which passes most rows: no calls, no reasoning, every content found after the one before it."""
    # 3 us, against 80 to 150 us for rendering the row a second time with marks. A short content may be in the text by
    # chance, so none is trusted in the roles that some templates leave out (system, developer, tool).
    place = 0
    for message in messages:
        content = message["content"].strip()
        place = text.find(content, place) + len(content)
        doubtful = 0 < len(content) < 16 and message["role"] not in ("user", "assistant")
        if doubtful or place < len(content) or "tool_calls" in message or not message.keys().isdisjoint(REASONING_KEYS):
            return False
    return True


def lost_content(conversation: Conversation, marked: str, words: Collection[str]) -> str | None:
    """Return the name of the first part of the messages that is missing from their text; None if none is.

    `marked`: the text rendered with marks. `words`: the names and literals in the template's code.
    """
    text, marks = take_marks(marked)
    seen = Counter((mark.message, mark.kind) for mark in marks)
    knows_reasoning = not set(REASONING_KEYS).isdisjoint(words)
    last = _last_turn(conversation.messages)
    between = _between(marks)
    for index, message in enumerate(conversation.messages):
        name = conversation.place(index)
        if message["content"].strip() and (index, "content") not in seen:
            return f"the content of {name} (role {message['role']})"
        # Each call's name has a mark at both ends.
        if "tool_calls" in message and seen[index, "tool_calls"] < 2 * len(message["tool_calls"]):
            return f"tool_calls of {name}"
        for key in REASONING_KEYS:
            # A template that knows reasoning may drop it from earlier turns: it does so in generation, too.
            may_drop = knows_reasoning and index != last and not conversation.keep
            if key in message and not may_drop and seen[index, "reasoning_content"] < 2:
                return f"the {key} of {name}"
        # Many templates cut a thought out of the content of earlier turns; it may be there once more in a later one.
        if index == last or (conversation.keep and message["role"] == "assistant"):
            begin, end = between.get(index, (0, None))
            part = _missing_part(message["content"], text[begin : end if index != last else None])
            if part is not None:
                return f"{shorten(repr(part))} in the content of {name}"
    return None


def _between(marks: Sequence[Mark]) -> dict[int, tuple[int, int | None]]:
    """Return where each message may be in the text.

    It is behind the last mark of an earlier message that is in front of the message's own last mark, and in front of
    the first mark of a later message that is behind its own first.
    """
    # Of all marks passed, only those of ever later messages can still be what is asked for: one step for each mark.
    begins: dict[int, int] = {}
    earlier: list[Mark] = []
    for mark in marks:
        while earlier and earlier[-1].message >= mark.message:
            earlier.pop()
        begins[mark.message] = earlier[-1].at if earlier else 0
        earlier.append(mark)
    found: dict[int, tuple[int, int | None]] = {}
    later: list[Mark] = []
    for mark in reversed(marks):
        while later and later[-1].message <= mark.message:
            later.pop()
        found[mark.message] = begins[mark.message], later[-1].at if later else None
        later.append(mark)
    return found


def _last_turn(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the assistant's message that ends the conversation; None if a user's message does."""
    for index in reversed(range(len(messages))):
        if messages[index]["role"] in ("assistant", "user"):
            return index if messages[index]["role"] == "assistant" else None
    return None


def _missing_part(content: str, text: str) -> str | None:
    """Return the first part of the content, between tags, that is not in the text. White space is ignored.

    Marks cannot show this: a template may cut something out between two marks, or move the reasoning to the front.
    """
    place, text = 0, "".join(text.split())
    for part in _TAG.split(content):
        words = "".join(part.split())
        place = text.find(words, place) + len(words)
        if place < len(words):
            return part.strip()
    return None
