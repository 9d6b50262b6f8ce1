"""Find the special tokens that end a turn, also where a template ends the last turn in another way than the others."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence


class Ends:
    """What ends turns in the texts of one template. `newer`: whether the rules of version 5 of the order hold."""

    def __init__(self, special: Sequence[str], *, newer: bool) -> None:
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        one = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._first, self._run = re.compile(rf"\s*(?:{one})"), re.compile(rf"(?:\s*(?:{one}))+")
        self._newer = newer

    def first(self, text: str, at: int) -> re.Match[str] | None:
        """Return the special token that stands there."""
        return self._first.match(text, at)

    def differ(self, closing: str, onward: str) -> int:
        """Return where special tokens begin that `closing` has, and `onward` does not; its length: there are none."""
        shared = len(os.path.commonprefix([closing, onward]))
        return next((run.start() for run in self._run.finditer(closing) if run.end() > shared), len(closing))

    def of_several(self, ends: tuple[str, str, str], at: int, *, is_last: bool) -> int | None:
        """Return how long the end of a turn is that has another one once the conversation goes on; None: it is unclear.

        `ends`: the one when the conversation ends there, when it goes on, and when it is generated on. `at`: where the
        tokens are in which they differ.
        """
        closing, onward, witness = ends
        if witness == closing:
            return None
        # Phi-3 ends a conversation with a token of its own, after the one that ends a turn. Only the special tokens
        # that all endings have are the turn's end.
        same, own = (self._leading(each, at) for each in (os.path.commonprefix(ends), closing))
        if same:
            return at + same
        if not (self._newer and own and self._leading(onward, at)):
            return None
        # gpt-oss: a model that stops writes the end of the last turn, and never the one that is put in its place when
        # the conversation goes on. White space is the content's own.
        return at + (own if is_last else len(closing[at:]) - len(closing[at:].lstrip()))

    def _leading(self, text: str, at: int) -> int:
        found = self._run.match(text, at)
        return 0 if found is None else len(found.group())
