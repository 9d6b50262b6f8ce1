"""Find thoughts in texts: those of rows, and empty ones that a template writes before an answer without reasoning.

A model that is trained on an empty thought, such as <think></think>, learns not to think. White space behind it belongs
to it.
"""

from __future__ import annotations

import re

# Bounded on both sides: without, a row of 8 MB that repeats "think" would keep a worker for a day.
_THOUGHT = r"[<\[][^<>\[\]\s]{0,40}(?:think|thought|reason)[^<>\[\]\s]{0,40}[>\]]"
_EMPTY = re.compile(rf"\s*{_THOUGHT}\s*{_THOUGHT}\s*", re.IGNORECASE)
_REST = re.compile(rf"\s*{_THOUGHT}\s*", re.IGNORECASE)
_END = re.compile(rf"\s*(?=..?/|<\|END){_THOUGHT}\s*", re.IGNORECASE)
_BEGINS = re.compile(rf"\s*{_THOUGHT}", re.IGNORECASE)
_LAST = re.compile(rf"(?:\s*{_THOUGHT})+\s*\Z", re.IGNORECASE)


_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def without_thought(content: str) -> str:
    """Return a message's content without the thought that it begins with.

    The opening tag may be missing: DeepSeek-R1's prompt ends with it, so the model writes only the closing one.
    """
    for opening, closing in _TAGS:
        before, found, rest = content.partition(closing)
        if found and (opening not in before or before.lstrip().startswith(opening)):
            return rest.lstrip()
    return content


def begins_with_thought(content: str) -> bool:
    """Return whether a message's own content begins with a thought, empty or not."""
    return _BEGINS.match(content) is not None


def behind_thought(text: str, anchor: int, start: int, first: int) -> int:
    """Return the place behind an empty thought between `start` and `first`; `start` if there is none.

    `anchor` to `start`: the generation prompt, which may have begun the thought.
    """
    is_open = _LAST.search(text, anchor, start) is not None
    found = (_REST if is_open else _EMPTY).match(text, start, first)
    return start if found is None else found.end()


def other_thought(text: str, anchor: int, asked: str, first: int) -> tuple[int, int] | None:
    """Return where an empty thought after `anchor` is, where the generation prompt ends with another one.

    Nemotron's prompt ends with <think> and a line break, and its turns begin with <think></think>.
    """
    tail = _LAST.search(asked)
    if tail is None or not text.startswith(asked[: tail.start()], anchor):
        return None
    begin = anchor + tail.start()
    found = _EMPTY.match(text, begin, first) or _END.match(text, begin, first)
    return None if found is None else found.span()
