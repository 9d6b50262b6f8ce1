"""Learn what a chat template does around turns, and which rules it needs, from conversations of our own."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from typing import Any

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.data.rows.conversation import Conversation
from raytune_fsdp.data.rows.habits import Habits
from raytune_fsdp.data.rows.marks import with_arguments_as_text
from raytune_fsdp.data.rows.templates import ChatTemplate, Refused, TooSlow, as_templates_see
from raytune_fsdp.data.rows.turns import Rendering, trained_spans


@lru_cache(maxsize=16)  # thousands of datasets may have one template
def learn(template: ChatTemplate, special: tuple[str, ...], *, newer: bool, tools: bool) -> Habits:
    """Return what a template does around turns, from conversations of our own. `tools`: whether they have tools.

    A template that fails with one may be right for all rows: then nothing is learned, and each turn is rendered. Raises
    TooSlow, because how fast a machine is may not decide that.
    """
    habits = Habits(is_by_turn=True)
    try:
        habits.wants_text = newer and _wants_text(template, tools=tools)
        for conversation in _samples(tools=tools) if not template.tags else []:
            with suppress(RowError):
                rendering = Rendering(template, conversation, special, newer=newer, habits=habits, row=False)
                rendering.check_nothing_is_ignored()
                rendering.note_gaps()
                for index, message in enumerate(conversation.messages):
                    if message["role"] == "assistant":
                        with suppress(RowError):
                            rendering.turn(index)
    except TooSlow:
        raise
    except DataError:
        return habits.by_turn()
    return habits.learned()


@lru_cache(maxsize=16)
def needs_newer(template: ChatTemplate, special: tuple[str, ...], *, tools: bool, everything: bool = False) -> bool:
    """Return whether the rules of version 5 of the order change what is trained on. `everything`: all tokens are.

    They may where a template fails with our conversations: nothing shows that older rules give the same.
    """
    if learn(template, special, newer=True, tools=tools).wants_text:
        return True

    def outcomes(newer: bool) -> list[Any]:
        habits = learn(template, special, newer=newer, tools=tools).by_turn()
        found: list[Any] = []
        for conversation in _samples(tools=tools):
            try:
                options: Any = {"special": special, "newer": newer, "habits": habits}
                loss: Any = "all" if everything else "assistant"
                found.append(trained_spans(template, conversation, loss=loss, **options))
            except RowError:
                found.append(None)
        return found

    try:
        return outcomes(newer=True) != outcomes(newer=False)
    except TooSlow:
        raise
    except DataError:
        return True


# Both kinds of quotes: where a template prints a whole call, its text would have neither form unchanged.
_ARGUMENTS = {"at": 'it\'s "here"', "now": True, "of": None}


def _wants_text(template: ChatTemplate, *, tools: bool) -> bool:
    """Return whether a template prints a call's arguments as they are, or joins them to a text.

    Rows have arguments as objects, which most templates write as JSON or look into. Printed as they are, they would be
    Python's text, with True for true.
    """
    for conversation in _samples(tools=tools):
        messages = as_templates_see(conversation.messages)
        for call in [call for message in messages for call in message.get("tool_calls", [])]:
            call["function"]["arguments"] = _ARGUMENTS
        as_text = [with_arguments_as_text(message) for message in messages]
        if as_text == messages:
            continue
        by_form: list[str | None] = []
        for form in (messages, as_text):
            try:
                by_form.append(template.render(form, conversation.tools)[0])
            except Refused:
                by_form.append(None)
        objects, text = by_form
        if text is not None:
            return objects is None or (str(_ARGUMENTS) in objects and json.dumps(_ARGUMENTS) in text)
    return False


def _samples(*, tools: bool) -> list[Conversation]:
    """Return conversations with what those of agents have: calls, several at once, and reasoning between them."""
    kinds = [_user("Is it?"), _answer("Yes."), _user("Why is it?"), _answer("It is so.")]
    call = [_user("What is it like there?"), _answer("", 1), _result(1), _answer("It rains.")]
    again = [*call[:-1], _answer("", 2), _result(2), _answer("It is cold.")]
    both = [_user("And both?"), _answer("", 3, 4), _result(3), _result(4), _answer("It rains there, and is cold.")]
    thought = [{**message, "reasoning_content": "I look."} if "tool_calls" in message else message for message in again]
    said = [{**message, "content": "I look."} if "tool_calls" in message else message for message in again]
    system = {"role": "system", "content": "Be brief."}
    reasons = [
        {**message, "reasoning_content": "I see."} if message["role"] == "assistant" else message for message in kinds
    ]
    longer = [*kinds, _user("Is it?"), _answer("Yes.")]
    found = [
        kinds[:2],
        kinds[:3],
        kinds,
        longer,
        longer[:5],
        reasons,
        [system, *kinds],
        [system, *kinds[:2]],
        [system, *longer],
        [system, *kinds[:3]],
        [*call, *kinds],
        again,
        both,
        thought,
        said,
        call[:2],
    ]
    look = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    given = [{"type": "function", "function": look}] if tools else None
    return [Conversation(each, [True] * len(each), given, "a sample", "messages") for each in found]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, *calls: int) -> dict[str, Any]:
    made = [
        {"type": "function", "id": f"look0000{each}", "function": {"name": "look", "arguments": {}}} for each in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _result(call: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"result {call}", "name": "look", "tool_call_id": f"look0000{call}"}
