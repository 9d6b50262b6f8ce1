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
follow (Qwen3 drops their reasoning). These renderings are left out where `habits` knows what they would show.

From version 5 of the order on, three things are trained on as generation writes them:

    no end of its own   where the next message's first token ends a turn (GLM, Baichuan), that token is the end; after
                        the last turn it is added to the text
    another end later   where a turn ends in another way once others follow (gpt-oss: <|return|>, then <|end|>), only
                        the end of the last turn is trained on
    an empty thought    that the template adds to a turn, as <think></think>, is not trained on; one of the row's own is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Literal

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.rows.conversation import Conversation, check_unicode
from raytune_fsdp.data.rows.ends import Ends
from raytune_fsdp.data.rows.habits import Habits, Key
from raytune_fsdp.data.rows.lost import has_all_contents_in_order, lost_content
from raytune_fsdp.data.rows.marks import (
    Mark,
    Places,
    after_last_mark,
    has_marks,
    kinds_in,
    messages_between,
    take_marks,
    with_arguments_as_text,
    with_marks,
)
from raytune_fsdp.data.rows.template_program import Span
from raytune_fsdp.data.rows.templates import ChatTemplate, Refused, TooMuchWork, as_templates_see, plain
from raytune_fsdp.data.rows.thoughts import behind_thought, other_thought

Loss = Literal["assistant", "last_turn", "all"]

_AHEAD = 32
"""How many conversations are rendered in one request."""
_ASKED = "Go on."
_CALL = ("\U0010fffb", "\U0010fffc")
"""Stand for the id and the name of a call."""
_WAY_OUT = (
    "put {% generation %} … {% endgeneration %} around the assistant's text in a copy of the template "
    "and name that file in data.chat_template"
)


def trained_spans(
    template: ChatTemplate,
    conversation: Conversation,
    *,
    loss: Loss,
    special: Sequence[str],
    newer: bool = True,
    habits: Habits | None = None,
) -> tuple[str, list[Span] | None]:
    """Return the text of the conversation, and the spans that are trained on (None: all of it). Raises RowError.

    `special`: the tokenizer's special tokens. `newer`: whether the rules of version 5 of the order hold. `habits`: what
    is known of the template; None: nothing.
    """
    return Rendering(template, conversation, special, newer=newer, habits=habits).trained(loss)


def render_ahead(renderings: Sequence[Rendering]) -> None:
    """Render conversations, each once, in few requests: a request takes as long as a short conversation."""
    by_template: dict[ChatTemplate, list[Rendering]] = {}
    for each in renderings:
        by_template.setdefault(each.template, []).append(each)
    for template, group in by_template.items():
        for first in range(0, len(group), _AHEAD):
            some = group[first : first + _AHEAD]
            found = template.render_all([(each.messages, each.tools) for each in some])
            for rendering, ahead in zip(some, found, strict=True):
                rendering.ahead = ahead


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


class Rendering:
    """A conversation as text, and where each message is in it."""

    def __init__(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        special: Sequence[str],
        *,
        newer: bool = True,
        habits: Habits | None = None,
        row: bool = True,
    ) -> None:
        """`row`: whether what is found is only for this conversation."""
        self.template = template
        self._conversation = conversation
        self._special = special
        self._newer = newer
        self.messages = as_templates_see(conversation.messages)
        self.tools = plain(conversation.tools)
        self.ahead: tuple[str, list[Span]] | None = None
        """What `render_ahead` has found."""
        self.added = ""
        """What is added to the text, so that its last turn has an end."""
        contents = [message["content"] for message in self.messages]
        self._found = [each for each in template.looked_for if any(each in content for content in contents)]
        habits = habits or Habits(is_by_turn=True)
        self._habits = habits.of_row(alike=not self._found) if row else habits
        self._has_calls = any(map(calls_of, self.messages))
        if self._has_calls and habits.wants_text:
            self.messages = [with_arguments_as_text(message) for message in self.messages]
        self._by_id = self._habits.names_calls_by_id

    @cached_property
    def _ends(self) -> Ends:
        return Ends(self._special, newer=self._newer)

    @property
    def text(self) -> str:
        return self._first_rendering[0]

    @property
    def tagged(self) -> list[Span]:
        """The spans in `{% generation %}`."""
        return self._first_rendering[1]

    def trained(self, loss: Loss) -> tuple[str, list[Span] | None]:
        """Return the text, and the spans that are trained on (None: all of it). Raises RowError."""
        self.whole()
        spans = self._spans(loss)
        return self.text + self.added, spans

    def whole(self) -> str:
        """Return the text as the template writes it, with all that the conversation has. Raises RowError."""
        check_unicode(self.text, f"{self._conversation.where}: the conversation")
        self.check_nothing_is_ignored()
        return self.text

    def _spans(self, loss: Loss) -> list[Span] | None:
        conversation = self._conversation
        muted = [index for index, train in enumerate(conversation.train) if not train]
        if loss == "all":
            self.add_end()
            return self.without(muted) if muted else None
        wanted = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if loss == "last_turn":
            wanted = wanted[-1:]
        if self.template.tags and loss == "assistant" and not any(index in wanted for index in muted):
            return _joined(self.tagged)
        return _joined([span for i in wanted if i not in muted for span in self.turn(i)])

    @cached_property
    def _first_rendering(self) -> tuple[str, list[Span]]:
        if self.ahead is not None:
            return self.ahead
        # DeepSeek's templates join arguments to other text, so they must be text already. Others write them as JSON.
        # What was learned of a template says which comes first.
        if self._newer and self._has_calls:
            as_objects = as_templates_see(self._conversation.messages)
            for form in (self.messages, as_objects, [with_arguments_as_text(each) for each in as_objects]):
                with suppress(Refused):
                    rendered = self._rendered(form, self.tools)
                    self.messages = form
                    return rendered
        return self._render(self.messages)

    def without(self, messages: Sequence[int]) -> list[Span]:
        """Return all of the text except these messages: whole turns of the assistant, only the words of other roles."""
        spans, start = [], 0
        for index in messages:
            if self._conversation.messages[index]["role"] == "assistant":
                cut = self.turn(index, thought=True)
            else:
                place = self._places.of(index)
                cut = [] if place is None else [place[:2]]
            for first, end in cut:
                spans.append((start, first))
                start = end
        return _joined([*spans, (start, len(self.text) + len(self.added))])

    def turn(self, index: int, *, thought: bool = False) -> list[Span]:
        """Return the spans that the assistant produces in message `index`; `thought`: with an empty one before it."""
        if self.template.tags:
            return self._tagged_by_message.get(index, [])
        place = self._places.of(index)
        if place is None:
            return []
        first, last, kind = place
        # A template may gather parts of several messages (such as all calls at the end): then no single span is the
        # turn.
        if not self._places.is_apart(index):
            raise self._unclear(index, "between parts of other messages")
        start, end = self._start(index, first, thought), self._end(index, last, kind)
        if not start <= last <= end:
            raise self._unclear(index, "not in one piece")
        return [(start, end)]

    def add_end(self) -> None:
        """Add an end to the last turn if the template leaves it to a message that does not follow."""
        index = len(self.messages) - 1
        if not self._newer or not self._habits.open_ended or self.messages[index]["role"] != "assistant":
            return
        if (place := self._places.of(index)) is not None:
            self._end(index, *place[1:])

    def check_nothing_is_ignored(self) -> None:
        """Refuse a row with content that is not in the text: it would be lost silently."""
        conversation = self._conversation
        if conversation.tools is None and (
            has_all_contents_in_order(conversation.messages, self.text) or self._known_places is not None
        ):
            return
        ignored = lost_content(conversation, self._marked_text, self.template.words) or self._lost_call()
        if ignored is None and conversation.tools is not None:
            looks = ("tools", self._looks(0), self._looks(1))
            ignored = "the tools" if self._habits.ask(looks, self._ignores_tools) else None
        if ignored is not None:
            raise self._error(
                f"the chat template leaves out {ignored}, which would be lost; remove it from the row, or name a "
                f"template that renders it in data.chat_template{self._unread()}"
            )

    def _ignores_tools(self) -> bool:
        try:
            return self._rendered(self.messages, None)[0] == self.text
        except Refused:
            return False

    def _lost_call(self) -> str | None:
        # Where a call's name is written again in front of its result, it may stand for a lost call.
        for index, calls in enumerate(map(calls_of, self.messages)):
            if self._newer and len(calls) > 1 and self._names_in(index) < 2 * len(calls):
                return f"tool_calls of {self._conversation.place(index)}"
        return None

    def _names_in(self, index: int) -> int:
        """Return how many marks are at names of functions in message `index` if the conversation ends there."""

        def find() -> int:
            marks = take_marks(self._render(self._marked[: index + 1])[0])[1]
            return sum((mark.message, mark.kind) == (index, "tool_calls") for mark in marks)

        looks = ("names", len(calls_of(self.messages[index])), self._looks(index - 1), self._looks(index))
        return int(self._habits.ask(looks, find))

    def _unread(self) -> str:
        """Return another way out if the row has a system message or tools in columns of their own."""
        columns = {"system": self._conversation.first > 0, "tools": self._conversation.tools is not None}
        found = "".join(f", or set the dataset's format.{name} to null" for name, there in columns.items() if there)
        return found + (", or set its format.reasoning to template or drop" if self._conversation.keep else "")

    @cached_property
    def _marked_text(self) -> str:
        text = self._render(self._marked)[0]
        if not self._newer or self._by_id or not self._has_calls or "tool_calls" in kinds_in(text):
            return text
        with suppress(Refused):
            marked = [with_marks(message, index, by_id=True) for index, message in enumerate(self.messages)]
            by_id = self._rendered(marked, self.tools)[0]
            if "tool_calls" in kinds_in(by_id) and take_marks(by_id)[0] == self.text:
                self._marked, self._habits.names_calls_by_id = marked, True
                return by_id
        return text

    @cached_property
    def _known_places(self) -> Places | None:
        """Where messages of words alone are, if the text is these words and, between them, what the template writes."""
        gaps = [self._habits.known(key) for key in self._gap_keys]
        if None in gaps or not gaps or has_marks(self.text):
            return None
        marks, at = [], 0
        for index, (gap, message) in enumerate(zip(gaps, self.messages, strict=False)):
            content = message["content"]
            start = at + len(gap)
            at = start + len(content)
            if content != content.strip() or self.text[start - len(gap) : at] != gap + content:
                return None
            marks += [Mark(start, index, "content"), Mark(at, index, "content")]
        return Places(marks, [0] * len(self.messages)) if self.text[at:] == gaps[-1] else None

    @property
    def _gap_keys(self) -> list[Key]:
        """What decides the texts between messages; empty if any has more than words."""
        if any(len(message) > 2 or not message["content"] for message in self.messages):
            return []
        roles = ["", *(message["role"] for message in self.messages), ""]
        many = len(roles) - 1
        return [("gap", min(i, 2), min(many - 1 - i, 3), *roles[i : i + 2]) for i in range(many)]

    def note_gaps(self) -> None:
        """Note what the template writes between the messages of a sample."""
        keys = self._gap_keys
        at = 0
        for index, key in enumerate(keys):
            place = self._places.of(index) if index < len(self.messages) else None
            first, last = (len(self.text), 0) if place is None else place[:2]
            gap = self.text[at:first]
            self._habits.ask(key, partial(str, gap))
            at = last

    @cached_property
    def _places(self) -> Places:
        if self._known_places is not None:
            return self._known_places
        text, marks = take_marks(self._marked_text)
        if text != self.text:
            raise self._error(
                "the chat template renders a message differently when one character is added to it, so its place in "
                f"the text cannot be found; {_WAY_OUT}, or remove the row"
            )
        return Places(marks, self._own_names(marks))

    def _own_names(self, marks: Sequence[Mark]) -> list[int]:
        """Return how many of the marks at names of functions belong to each message.

        gpt-oss writes the name once more in front of the result, which is another message's.
        """
        found = [0] * len(self.messages)
        for mark in marks:
            found[mark.message] += mark.kind == "tool_calls"
        if self._newer:
            for index, calls in enumerate(map(calls_of, self.messages)):
                found[index] = found[index] if found[index] <= 2 * len(calls) else self._names_in(index)
        return found

    @cached_property
    def _marked(self) -> list[dict[str, Any]]:
        if has_marks(self.text):
            raise self._error(
                "the text has private-use characters (U+F0000 to U+FFFFD), which are used here to find the assistant's "
                "turns; remove them or the row"
            )
        return [with_marks(message, index, by_id=self._by_id) for index, message in enumerate(self.messages)]

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

    def _looks(self, index: int) -> Key:
        """Return what message `index` looks like to a template."""
        if index < 0 or index >= len(self.messages):
            return ()
        message = self.messages[index]
        content = message["content"]
        parts = tuple(key for key in ("tool_calls", "reasoning_content") if key in message)
        return message["role"], bool(content.strip()), parts, tuple(each for each in self._found if each in content)

    def _start(self, index: int, first: int, thought: bool) -> int:
        before = self._places.before(index)
        anchor = 0 if before is None else before.at
        gap = self.text[anchor:first]
        seen = None if before is None else (index - before.message, before.kind)
        looks = (gap, seen, self._looks(index - 1), self._looks(index))

        def prompt() -> tuple[str, tuple[int, str] | None]:
            asked, mark = after_last_mark(self._render(self._marked[:index], prompt=True)[0])
            return asked, None if mark is None else (index - mark[0], mark[1])

        asked, mark = self._habits.ask(("prompt", *looks), prompt)
        if mark != seen or anchor > first:
            raise self._unclear(index, "differently with and without the messages after it")
        if self.text.startswith(asked, anchor):
            return self._begins(index, anchor, anchor + len(asked), first, thought)
        # The generation prompt may go on after the header of this turn: DeepSeek's and Qwen3.5's also open the
        # reasoning, which earlier turns no longer have.
        if gap.strip() and asked.startswith(gap):
            return first
        header = self._habits.ask(("header", *looks), lambda: self._header_of_words(index))
        if header.strip() and asked.startswith(header) and self.text.startswith(header, anchor):
            return self._begins(index, anchor, anchor + len(header), first, thought)
        if self._newer:
            found = other_thought(self.text, anchor, asked, first, self.messages[index]["content"])
            if found is not None:
                return found[0] if thought else found[1]
        raise self._unclear(index, "after something other than the generation prompt")

    def _begins(self, index: int, anchor: int, start: int, first: int, thought: bool) -> int:
        if thought or not self._newer or start >= first:
            return start
        return behind_thought(self.text, anchor, start, first, self.messages[index]["content"])

    def _header_of_words(self, index: int) -> str:
        """Return the text before message `index` as it would be if that had only words, no call and no reasoning."""
        words = with_marks({"role": "assistant", "content": "Yes."}, index)
        try:
            text, _ = self._rendered([*self._marked[:index], words, *self._marked[index + 1 :]], self.tools)
        except Refused:
            return ""
        text, marks = take_marks(text)
        first = min((mark.at for mark in marks if mark.message == index), default=0)
        return text[max((mark.at for mark in marks if mark.message < index), default=0) : first]

    def _end(self, index: int, last: int, kind: str) -> int:
        """Return the place after the text that closes the turn, whether the conversation ends there or goes on."""
        is_last = index + 1 == len(self.messages)
        behind = self.text[last : self._places.after(index)]
        looks = (kind, behind, self._looks(index), self._looks(index - 1), self._looks(index + 1))
        if is_last:
            closing, is_own = self.text[last:], self._places.final == index
            looked = (kind, closing, self._looks(index))
            onward = self._habits.ask(("onward", *looked), lambda: self._if_asked_again(index))
        else:
            closing, is_own = self._closing_before(index, behind, looks)
            onward = self.text[last:]
        if not is_own:
            raise self._unclear(index, "differently with and without the messages after it")
        if self._newer and (not closing.strip() or (self._habits.open_ended and kind == "tool_calls")):
            return last + self._open_end(index, closing, onward)
        if onward is not None and not onward.startswith(closing):
            ends = (closing, onward, self._closing_before_prompt(index, closing, looks))
            found = self._ends.of_several(ends, 0, is_last=is_last)
            if found is None and self._newer:  # behind a call, its own end comes before
                found = self._ends.of_several(ends, self._ends.differ(closing, onward), is_last=is_last)
            if found is None:
                raise self._unclear(index, "with a different end when the conversation goes on")
            closing = closing[:found]
        # The line break after the end of a turn is not the assistant's, unless nothing else ends the turn.
        return last + len(closing.rstrip() or closing)

    def _closing_before_prompt(self, index: int, closing: str, looks: Key) -> str:
        """Return what follows message `index` if the conversation ends there with the generation prompt."""

        def find() -> str:
            return self._closing(index, prompt=True)[0]

        if looks[0] != "tool_calls":
            found: str = self._habits.ask(("witness", *looks), find)
            return found
        # In front of it are arguments, which differ from call to call.
        added = self._habits.ask(
            ("added", looks[0], *looks[2:]), lambda: find()[len(closing) :] if find().startswith(closing) else None
        )
        return find() if added is None else closing + added

    def _open_end(self, index: int, closing: str, onward: str | None) -> int:
        """Return the length of the end of a turn that only the next message ends, with what that begins with."""
        is_last = index + 1 == len(self.messages)
        if not is_last and self.messages[index + 1]["role"] == "assistant":
            return len(closing.rstrip() or closing)  # it goes on
        if is_last and calls_of(self.messages[index]):
            looked = ("result", closing, self._looks(index))
            onward = self._habits.ask(looked, lambda: self._if_asked_again(index, result=True)) or onward
        onward = onward or ""
        begin = len(closing) if onward.startswith(closing) else 0
        found = self._ends.first(onward, begin)
        if found is None and not closing:
            raise self._error(
                f"the chat template writes nothing after {self._conversation.place(index)}, nor a token in front of "
                "the message that follows, so the model would not learn to end its turn; write the token that ends a "
                "turn there ({{ eos_token }}) in a copy of the template and name that file in data.chat_template"
            )
        if found is None:
            return len(closing.rstrip() or closing)
        if is_last:
            self._habits.open_ended = True
            self.added = found.group() if begin or not closing else found.group().lstrip()
            return len(closing) + len(self.added)
        return found.end()

    def _closing_before(self, index: int, behind: str, looks: Key) -> tuple[str, bool]:
        """Return what `_closing` does for a message with others behind it. `behind`: the text up to their mark."""
        if looks[0] != "tool_calls":
            found: tuple[str, bool] = self._habits.ask(("end", *looks), lambda: self._closing(index))
            return found

        # Behind a call's name are its arguments, which differ from call to call: what comes after the end does not, but
        # for what it says of the call that the next message is the result of.
        after = self.messages[index + 1]
        call = calls_of(self.messages[index])[0] if calls_of(self.messages[index]) else after
        shown = [after.get("tool_call_id"), after.get("name") or call.get("function", {}).get("name")]
        own = {mark: each for mark, each in zip(_CALL, shown, strict=True) if isinstance(each, str) and each}
        for mark, each in own.items():
            behind = behind.replace(each, mark)

        def find() -> tuple[tuple[str, str] | None, bool]:
            closing, is_own = self._closing(index)
            for mark, each in own.items():
                closing = closing.replace(each, mark)
            shared = len(closing) if behind.startswith(closing) else self._ends.differ(closing, behind)
            return ((closing[shared:], behind[shared:]) if behind.startswith(closing[:shared]) else None), is_own

        rest, is_own = self._habits.ask(("rest", looks[0], *looks[2:]), find)
        if rest is None or not behind.endswith(rest[1]):
            return self._closing(index)
        closing = behind[: len(behind) - len(rest[1])] + rest[0]
        for mark, each in own.items():
            closing = closing.replace(mark, each)
        return closing, is_own

    def _closing(self, index: int, *, prompt: bool = False) -> tuple[str, bool]:
        """Return what follows message `index` if the conversation ends there, and whether its mark is the last."""
        closing, mark = after_last_mark(self._render(self._marked[: index + 1], prompt=prompt)[0])
        return closing, mark is not None and mark[0] == index

    def _if_asked_again(self, index: int, *, result: bool = False) -> str | None:
        """Return what follows the last message if the user asks again, or the last of its calls has a result."""
        more: dict[str, Any] = {"role": "user", "content": _ASKED}
        if result:
            call = calls_of(self.messages[index])[-1]
            more = {"role": "tool", "content": _ASKED, "name": call["function"]["name"]}
            more |= {"tool_call_id": call["id"]} if "id" in call else {}
        try:
            text, _ = self._rendered([*self._marked, more], self.tools)
        except Refused:
            return None
        text, marks = take_marks(text)
        found = Places(marks, self._own_names(marks)).of(index)
        return None if found is None else text[found[1] :].partition(_ASKED)[0]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> tuple[str, list[Span]]:
        try:
            return self._rendered(messages, self.tools, prompt=prompt)
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
            return self.template.render(messages, tools, prompt=prompt)
        except TooMuchWork as error:
            raise type(error)(f"{self._conversation.where}: {error}") from None

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
