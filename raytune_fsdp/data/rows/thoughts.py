"""Find thoughts in texts: those of rows, and empty ones that a template writes before an answer without reasoning.

A model that is trained on an empty thought, such as <think></think>, learns not to think. White space behind it belongs
to it.
"""

from __future__ import annotations

import re

# Bounded on both sides: without, a row of 8 MB that repeats "think" would keep a worker for a day.
_NEAR = r"[^<>\[\]\s]{0,40}"
_THOUGHT = rf"[<\[]{_NEAR}(?:think|thought|reason){_NEAR}[>\]]"
_EMPTY = re.compile(rf"\s*{_THOUGHT}\s*{_THOUGHT}\s*", re.IGNORECASE)
_REST = re.compile(rf"\s*{_THOUGHT}\s*", re.IGNORECASE)
_END = re.compile(rf"\s*(?=..?/|<\|END){_THOUGHT}\s*", re.IGNORECASE)
# Of a text from its end on: a search for what ends it would begin at each of 100,000 blanks, and go through the rest.
_LAST = re.compile(rf"\s*(?:[>\]]{_NEAR}(?:kniht|thguoht|nosaer){_NEAR}[<\[]\s*)+", re.IGNORECASE)

_WHOLE = re.compile(r"\s*(?:<think>.*?</think>|\[THINK\].*?\[/THINK\])", re.DOTALL)
_ALONE = re.compile(r"^</think>\r?$", re.MULTILINE)


def without_thought(content: str) -> str:
    """Return a message's content without the thoughts that it begins with.

    DeepSeek-R1's prompt ends with <think>, so its distilled models write only the closing tag, on a line of its own.
    Elsewhere such a tag may be what an answer is about.
    """
    alone = _ALONE.search(content)
    place = alone.end() if alone is not None and content.find("<think>", 0, alone.start()) < 0 else 0
    while (found := _WHOLE.match(content, place)) is not None:
        place = found.end()
    return content[place:].lstrip() if place else content


def behind_thought(text: str, anchor: int, start: int, first: int, content: str) -> int:
    """Return the place behind an empty thought between `start` and `first`; `start` if there is none.

    `anchor` to `start`: the generation prompt, which may have begun the thought. `content`: the message's own.
    """
    is_open = _thoughts_at_end(text[anchor:start]) is not None
    found = (_REST if is_open else _EMPTY).match(text, start, first)
    return start if found is None or _is_own(text, found.end(), content) else found.end()


def other_thought(text: str, anchor: int, asked: str, first: int, content: str) -> tuple[int, int] | None:
    """Return where an empty thought after `anchor` is, where the generation prompt ends with another one.

    Nemotron's prompt ends with <think> and a line break, and its turns begin with <think></think>.
    """
    tail = _thoughts_at_end(asked)
    if tail is None or not text.startswith(asked[:tail], anchor):
        return None
    found = _EMPTY.match(text, anchor + tail, first) or _END.match(text, anchor + tail, first)
    return None if found is None or _is_own(text, found.end(), content) else found.span()


def _is_own(text: str, end: int, content: str) -> bool:
    """Return whether an empty thought is the row's, which the message's content begins with.

    It is the template's where the whole content, with its own thought, stands behind it.
    """
    return _EMPTY.match(content) is not None and not text.startswith(content.strip(), end)


def _thoughts_at_end(text: str) -> int | None:
    """Return where the tags of thoughts that end a text begin, with white space around; None if there are none."""
    found = _LAST.match(text[::-1])
    return None if found is None else len(text) - found.end()
