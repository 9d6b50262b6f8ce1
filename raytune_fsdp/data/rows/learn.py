"""Learn what a chat template does around turns, and which rules it needs, from conversations of our own."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.rows.conversation import Conversation
from raytune_fsdp.data.rows.habits import Habits
from raytune_fsdp.data.rows.templates import ChatTemplate
from raytune_fsdp.data.rows.turns import Rendering, trained_spans


@lru_cache(maxsize=16)  # thousands of datasets may have one template
def learn(template: ChatTemplate, special: tuple[str, ...], *, newer: bool, tools: bool) -> Habits:
    """Return what a template does around turns, from conversations of our own. `tools`: whether they have tools."""
    habits = Habits(by_turn=True)
    for conversation in _samples(tools=tools) if not template.tags else []:
        with suppress(RowError):
            rendering = Rendering(template, conversation, special, newer=newer, habits=habits, row=False)
            rendering.check_nothing_is_ignored()
            rendering.note_gaps()
            for index, message in enumerate(conversation.messages):
                if message["role"] == "assistant":
                    with suppress(RowError):
                        rendering.turn(index)
    return habits.learned()


@lru_cache(maxsize=16)
def needs_newer(template: ChatTemplate, special: tuple[str, ...], *, tools: bool, everything: bool = False) -> bool:
    """Return whether the rules of version 5 of the order change what is trained on. `everything`: all tokens are."""

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

    return outcomes(newer=True) != outcomes(newer=False)


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
    schema = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": _NO_PARAMETERS}}
    given = [schema] if tools else None
    return [Conversation(each, [True] * len(each), given, "a sample", "messages") for each in found]


_NO_PARAMETERS = {"type": "object", "properties": {}}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, *calls: int) -> dict[str, Any]:
    made = [
        {"type": "function", "id": f"look00000{each}", "function": {"name": "look", "arguments": {}}} for each in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _result(call: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"result {call}", "name": "look", "tool_call_id": f"look00000{call}"}
