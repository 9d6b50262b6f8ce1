"""Special tokens written out in the contents of rows: `data.special_tokens_in_text`.

To the tokenizer `<|im_end|>` in a user's question is the token that ends a turn. With `escape` a private-use character
is put behind the first character of each before the row becomes text. When it is text, the places of these characters
are known, they are taken out again, and what stood there is encoded as plain text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.rows.sandbox import Span

Policy = Literal["keep", "escape", "error"]

BREAK = "\U0010fffd"


class SpecialTokens:
    """What is done with the special tokens of a tokenizer where a row's contents have them."""

    def __init__(self, tokens: Sequence[str], policy: Policy) -> None:
        self._policy = policy
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def guard(self, content: Any, where: str) -> Any:
        """The content, with a break in each special token; the same object if there is none. Raises RowError."""
        if self._policy == "keep" or content is None:
            return content
        if isinstance(content, str):
            return self._guarded(content, where)
        if isinstance(content, list):
            made: Any = [self.guard(item, where) for item in content]
        elif isinstance(content, dict):
            made = {self.guard(key, where): self.guard(item, where) for key, item in content.items()}
        else:
            return content
        return content if made == content else made

    def without_breaks(self, text: str, spans: list[Span] | None) -> tuple[str, list[Span] | None, list[Span]]:
        """The text and its spans without the breaks, and where the special tokens are that are plain text."""
        if self._policy == "keep" or BREAK not in text:
            return text, spans, []
        breaks = [match.start() for match in re.finditer(BREAK, text)]
        text = text.replace(BREAK, "")
        if spans is not None:
            spans = [(start - bisect_left(breaks, start), end - bisect_left(breaks, end)) for start, end in spans]
        found = (self._pattern.match(text, max(0, at - index - 1)) for index, at in enumerate(breaks))
        return text, spans, [match.span() for match in found if match is not None]

    def _guarded(self, text: str, where: str) -> str:
        if self._policy == "error" and (match := self._pattern.search(text)):
            raise RowError(
                f"{where}: the text has the special token {match.group()!r}; correct or remove the row, or set "
                "data.special_tokens_in_text to escape (it is encoded as plain text) or keep",
                "special_token",
            )
        if BREAK in text:
            raise RowError(
                f"{where}: the text has the private-use character U+10FFFD, which data.special_tokens_in_text=escape "
                "needs; remove it or the row",
                "special_token",
            )
        return self._pattern.sub(lambda match: match.group()[0] + BREAK + match.group()[1:], text)
