"""Find the characters of a rendered conversation that are trained on: the assistant's turns, with whatever ends them.

A template with `{% generation %}` marks them itself. For other templates, and to find the message a span belongs to,
the conversation is rendered again with a mark (a private-use character) at both ends of every text of every message.
The result must be the same text but for the marks, or the row is an error. So the marks show exactly where each message
is, and whether it is there at all.

    start of a turn   render the conversation before it, with the generation prompt: the turn starts after the text that
                      follows the last mark there
    end of a turn     render the conversation up to and including it: the turn ends with the text that follows the last
                      mark there

Only the text after the last mark is compared, because a template may render earlier turns differently once others
follow (Qwen3 drops their reasoning).
"""

from __future__ import annotations

import os.path
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, NamedTuple

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.rows.conversation import Conversation, check_unicode
from raytune_fsdp.data.rows.template_program import Span
from raytune_fsdp.data.rows.templates import REASONING_KEYS, ChatTemplate, Refused, TooMuchWork, as_templates_see, plain
from raytune_fsdp.data.sources.source import shorten

_WAY_OUT = (
    "put {% generation %} … {% endgeneration %} around the assistant's text in a copy of the template "
    "and name that file in data.chat_template"
)


def trained_spans(
    template: ChatTemplate,
    conversation: Conversation,
    *,
    loss: Literal["assistant", "last_turn", "all"],
    special: Sequence[str],
) -> tuple[str, list[Span] | None]:
    """Return the text of the conversation, and the spans that are trained on (None: all of it). Raises RowError.

    `special`: the tokenizer's special tokens.
    """
    rendering = Rendering(template, conversation, special)
    check_unicode(rendering.text, f"{conversation.where}: the conversation")
    rendering.check_nothing_is_ignored()
    muted = [index for index, train in enumerate(conversation.train) if not train]
    if loss == "all":
        return rendering.text, rendering.without(muted) if muted else None
    wanted = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if loss == "last_turn":
        wanted = wanted[-1:]
    if template.tags and loss == "assistant" and not any(index in wanted for index in muted):
        return rendering.text, _joined(rendering.tagged)
    return rendering.text, _joined([span for i in wanted if i not in muted for span in rendering.turn(i)])


class Rendering:
    """A conversation as text, and where each message is in it."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, special: Sequence[str]) -> None:
        self._template = template
        self._conversation = conversation
        self._special = special
        self._messages = as_templates_see(conversation.messages)
        self._tools = plain(conversation.tools)
        self.text, self.tagged = self._render(self._messages)

    def without(self, messages: Sequence[int]) -> list[Span]:
        """Return all of the text except these messages: whole turns of the assistant, only the words of other roles."""
        spans, start = [], 0
        for index in messages:
            if self._conversation.messages[index]["role"] == "assistant":
                cut = self.turn(index)
            else:
                places = [mark.at for mark in self._marks if mark.message == index]
                cut = [(min(places), max(places))] if places else []
            for first, end in cut:
                spans.append((start, first))
                start = end
        return _joined([*spans, (start, len(self.text))])

    def turn(self, index: int) -> list[Span]:
        """Return the spans that the assistant produces in message `index`."""
        if self._template.tags:
            return self._tagged_by_message.get(index, [])
        places = [mark.at for mark in self._marks if mark.message == index]
        if not places:
            return []
        first, last = min(places), max(places)
        # A template may gather parts of several messages (such as all calls at the end): then no single span is the
        # turn.
        if any((mark.at > first and mark.message < index) or (mark.at < last and mark.message > index)
               for mark in self._marks):  # fmt: skip
            raise self._unclear(index, "between parts of other messages")
        start, end = self._start(index, first), self._end(index, last)
        if not start <= last <= end:
            raise self._unclear(index, "not in one piece")
        return [(start, end)]

    def check_nothing_is_ignored(self) -> None:
        """Refuse a row with content that is not in the text: it would be lost silently."""
        conversation = self._conversation
        if conversation.tools is None and has_all_contents_in_order(conversation.messages, self.text):
            return
        ignored = lost_content(conversation, self._marked_text, self._template.words)
        if ignored is None and conversation.tools is not None:
            with suppress(Refused):
                if self._rendered(self._messages, None)[0] == self.text:
                    ignored = "the tools"
        if ignored is not None:
            raise self._error(
                f"the chat template leaves out {ignored}, which would be lost; remove it from the row, or name a "
                f"template that renders it in data.chat_template{self._unread()}"
            )

    def _unread(self) -> str:
        """Return another way out if the row has a system message or tools in columns of their own."""
        columns = {"system": self._conversation.first > 0, "tools": self._conversation.tools is not None}
        return "".join(f", or set the dataset's format.{name} to null" for name, there in columns.items() if there)

    @cached_property
    def _marked_text(self) -> str:
        return self._render(self._marked)[0]

    @cached_property
    def _marks(self) -> list[Mark]:
        text, marks = take_marks(self._marked_text)
        if text != self.text:
            raise self._error(
                "the chat template renders a message differently when one character is added to it, so its place in "
                f"the text cannot be found; {_WAY_OUT}, or remove the row"
            )
        return marks

    @cached_property
    def _marked(self) -> list[dict[str, Any]]:
        if has_marks(self.text):
            raise self._error(
                "the text has private-use characters (U+F0000 to U+FFFFD), which are used here to find the assistant's "
                "turns; remove them or the row"
            )
        return [with_marks(message, index) for index, message in enumerate(self._messages)]

    @cached_property
    def _tagged_by_message(self) -> dict[int, list[Span]]:
        marked, spans = self._render(self._marked)
        if take_marks(marked)[0] != self.text or len(spans) != len(self.tagged):
            raise self._unclear_tags()
        found: dict[int, list[Span]] = {}
        last: tuple[int, int] | None = None
        for (start, end), span in zip(spans, self.tagged, strict=True):
            # A span without a mark belongs to the message of the span before it, if the two touch: it is a turn's end
            # token in a `{% generation %}` of its own.
            inside = messages_between(marked, start, end)
            if not inside and last is not None and last[1] == span[0]:
                inside = {last[0]}
            if span[0] == span[1]:
                continue
            if len(inside) != 1:
                raise self._unclear_tags()
            last = (inside.pop(), span[1])
            found.setdefault(last[0], []).append(span)
        return found

    def _start(self, index: int, first: int) -> int:
        before = [mark for mark in self._marks if mark.message < index]
        asked, mark = after_last_mark(self._render(self._marked[:index], prompt=True)[0])
        if not before and mark is None:
            anchor = 0
        elif before and (before[-1].message, before[-1].kind) == mark:
            anchor = before[-1].at
        else:
            raise self._unclear(index, "differently with and without the messages after it")
        if self.text.startswith(asked, anchor):
            return anchor + len(asked)
        # The generation prompt may go on after the header of this turn: DeepSeek's and Qwen3.5's also open the
        # reasoning, which earlier turns no longer have.
        for header in (self.text[anchor:first], self._header_of_words(index)):
            if header.strip() and asked.startswith(header) and self.text.startswith(header, anchor):
                return anchor + len(header)
        raise self._unclear(index, "after something other than the generation prompt")

    def _header_of_words(self, index: int) -> str:
        """Return the text before message `index` as it would be if that had only words, no call and no reasoning."""
        words = with_marks({"role": "assistant", "content": "Yes."}, index)
        try:
            text, _ = self._rendered([*self._marked[:index], words, *self._marked[index + 1 :]], self._tools)
        except Refused:
            return ""
        text, marks = take_marks(text)
        first = min((mark.at for mark in marks if mark.message == index), default=0)
        return text[max((mark.at for mark in marks if mark.message < index), default=0) : first]

    def _end(self, index: int, last: int) -> int:
        """Return the place after the text that closes the turn, whether the conversation ends there or goes on."""
        if index + 1 < len(self._conversation.messages):
            closing, mark = after_last_mark(self._render(self._marked[: index + 1])[0])
            onward: str | None = self.text[last:]
        else:
            closing, mark = after_last_mark(self._marked_text)
            onward = self._if_asked_again(index)
        if mark is None or mark[0] != index:
            raise self._unclear(index, "differently with and without the messages after it")
        if onward is not None and not onward.startswith(closing):
            # Phi-3 ends a conversation with a token of its own, after the one that ends a turn. Only the special tokens
            # that both endings have are the turn's end.
            witness, _ = after_last_mark(self._render(self._marked[: index + 1], prompt=True)[0])
            same = re.match(self._specials, os.path.commonprefix([closing, onward, witness]))
            if witness == closing or same is None:
                raise self._unclear(index, "with a different end when the conversation goes on")
            closing = same.group()
        # The line break after the end of a turn is not the assistant's, unless nothing else ends the turn.
        return last + len(closing.rstrip() or closing)

    def _if_asked_again(self, index: int) -> str | None:
        try:
            text, _ = self._rendered([*self._marked, {"role": "user", "content": "Go on."}], self._tools)
        except Refused:
            return None
        text, marks = take_marks(text)
        places = [mark.at for mark in marks if mark.message == index]
        return text[max(places) :] if places else None

    @cached_property
    def _specials(self) -> str:
        longest_first = sorted(self._special, key=len, reverse=True)
        return rf"(?:\s*(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'}))+"

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> tuple[str, list[Span]]:
        try:
            return self._rendered(messages, self._tools, prompt=prompt)
        except Refused as refused:
            roles = ", ".join(message["role"] for message in messages) or "none"
            raise self._error(
                f"the chat template refused the conversation ({refused}); its roles are {roles}; "
                f"correct the row, or name another template in data.chat_template{self._unread()}"
            ) from refused

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            return self._template.render(messages, tools, prompt=prompt)
        except TooMuchWork as error:
            raise TooMuchWork(f"{self._conversation.where}: {error}") from None

    def _error(self, message: str) -> RowError:
        return RowError(f"{self._conversation.where}: {message}", "template")

    def _unclear(self, index: int, how: str) -> RowError:
        return self._error(
            f"the chat template has no {{% generation %}}, and renders {self._conversation.place(index)} {how}, so "
            f"the assistant's part of it cannot be found; {_WAY_OUT}"
        )

    def _unclear_tags(self) -> RowError:
        return self._error(
            "the chat template's {% generation %} spans cannot be assigned to single messages, which "
            'loss=last_turn and messages that are not trained on ("train": false, "weight": 0) require; put one around '
            "each message of the assistant in a copy of the template and name that file in data.chat_template"
        )


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order, without empty ones; touching or overlapping spans become one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined


# Marks: private-use characters around the texts of messages, which show where a template puts each message.
#
# There is one character for each message and kind of text, from U+F0000 to U+FFFFD: enough for 21,844 messages.

_FIRST = 0xF0000
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_KINDS = ("content", "tool_calls", "reasoning_content")


class Mark(NamedTuple):
    """A mark before character `at` of the text: the start or the end of a part of a message."""

    at: int
    message: int
    kind: str


def has_marks(text: str) -> bool:
    """Return whether the text has such characters already."""
    return _MARK.search(text) is not None


def with_marks(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the message with marks around its content, its reasoning and the names of the functions it calls."""
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


# Find content of a row that is missing from its rendered text: without this check it would be lost silently.

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
    for index, message in enumerate(conversation.messages):
        name = conversation.place(index)
        if message["content"].strip() and (index, "content") not in seen:
            return f"the content of {name} (role {message['role']})"
        # Each call's name has a mark at both ends.
        if "tool_calls" in message and seen[index, "tool_calls"] < 2 * len(message["tool_calls"]):
            return f"tool_calls of {name}"
        for key in REASONING_KEYS:
            # A template that knows reasoning may drop it from earlier turns: it does so in generation, too.
            may_drop = knows_reasoning and index != last
            if key in message and not may_drop and seen[index, "reasoning_content"] < 2:
                return f"the {key} of {name}"
        if index == last:
            # Look after the last mark of an earlier message that stands in front of this one.
            end = max((mark.at for mark in marks if mark.message == index), default=0)
            begin = max((mark.at for mark in marks if mark.message < index and mark.at <= end), default=0)
            part = _missing_part(message["content"], text[begin:])
            if part is not None:
                return f"{shorten(repr(part))} in the content of {name}"
    return None


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
