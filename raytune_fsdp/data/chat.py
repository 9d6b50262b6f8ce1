"""A conversation becomes token ids and a mask of the tokens that the assistant wrote.

The mask comes from `{% generation %}` in the chat template where it has that. Where it has not, from the difference
between the conversation rendered with and without a turn, if that is exact to the token; else it is a DataError.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from raytune_fsdp.data.sources import shorten
from raytune_fsdp.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")

# Some templates (Llama 3.2) print today's date unless told another; the data must not depend on the day it is read.
_DATE = "26 Jul 2024"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ADD_GENERATION = (
    "put {% generation %} … {% endgeneration %} around the assistant's text in a copy of the template "
    "and name that file in data.chat_template"
)


def resolve_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    """The text of the template that conversations are rendered with: the one given, else the tokenizer's own."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} is not a fast tokenizer: the tokens of the assistant cannot be told apart; "
            "use a tokenizer with a tokenizer.json, or datasets with format.type=tokens"
        )
    try:
        template = chat_template or tokenizer.get_chat_template()
    except ValueError:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, format.type=chat needs one; "
            "name a file with a Jinja template in data.chat_template, or use format.type=completion"
        ) from None
    if "strftime_now" in template and "date_string" not in template:
        raise DataError(
            "the chat template prints the current date (strftime_now), so the same data would be different tomorrow; "
            "write a fixed date into a copy of the template and name that file in data.chat_template"
        )
    return template


def check_messages(messages: Any, *, column: str, where: str) -> list[dict[str, Any]]:
    """The conversation as it is, if it is one: a list of messages with a known role and text."""
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: {column}={shorten(messages)} is not a list of messages; "
            'each row needs [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
        )
    for index, message in enumerate(messages):
        place = f"{where}: {column}[{index}]"
        if not isinstance(message, dict):
            raise DataError(f"{place}={shorten(message)} is not an object; a message has a role and a content")
        role = message.get("role")
        if role not in ROLES:
            raise DataError(
                f"{place}.role={shorten(role)} is missing or unknown; it must be one of {', '.join(ROLES)} "
                "(rename human to user, gpt or bot to assistant)"
            )
        check_text(message.get("content"), place=f"{place}.content")
    return messages


def check_text(value: Any, *, place: str) -> str:
    """The text as it is, if it is one that a tokenizer can take."""
    if not isinstance(value, str):
        kind = "missing or null" if value is None else f"a {type(value).__name__}"
        raise DataError(f"{place}={shorten(value)} is {kind}, not text; correct or remove the row")
    if not value.strip():
        raise DataError(f"{place}={shorten(repr(value))} is empty; correct or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} has half a surrogate pair, {value[error.start]!r}, at character {error.start}; "
            "correct or remove the row"
        ) from None
    return value


def to_ids_and_mask(
    messages: list[dict[str, Any]], *, tokenizer: PreTrainedTokenizerBase, template: str, where: str
) -> tuple[list[int], list[bool]]:
    """Token ids of the conversation, and for each whether the assistant wrote it (the end of its turn included)."""
    try:
        if not _GENERATION.search(template):
            return _mask_by_prefixes(messages, tokenizer=tokenizer, template=template, where=where)
        encoded: Any = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            date_string=_DATE,
        )
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{where}: the chat template refused the conversation ({error}); its roles are {roles}; "
            "correct the row, or name another template in data.chat_template"
        ) from error
    mask = [bool(flag) for flag in encoded["assistant_masks"]]
    _check_turns(messages, mask, encoded.encodings[0].offsets, where=where)
    return encoded["input_ids"], mask


def _check_turns(
    messages: list[dict[str, Any]], mask: list[bool], offsets: list[tuple[int, int]], *, where: str
) -> None:
    # Where a tokenizer drops the character at which a turn starts or ends, transformers loses the turn, or takes all
    # that follows for the assistant's. Both leave fewer turns in the mask than there are in the conversation.
    before = [None, *(message["role"] for message in messages)]
    turns = sum(message["role"] == "assistant" != last for message, last in zip(messages, before, strict=False))
    found = sum(flag and not last for flag, last in zip(mask, [False, *mask], strict=False))
    gaps = any(start > end for (start, _), (_, end) in zip(offsets[1:], offsets, strict=False))
    if found < turns and gaps:
        raise DataError(
            f"{where}: the tokenizer drops characters at the border of an assistant's turn ({found} of {turns} turns "
            "are in the mask); keep white space out of {% generation %} … {% endgeneration %}, or strip the row's text"
        )


def _mask_by_prefixes(
    messages: list[dict[str, Any]], *, tokenizer: PreTrainedTokenizerBase, template: str, where: str
) -> tuple[list[int], list[bool]]:
    def render(count: int, *, prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages[:count], chat_template=template, tokenize=False, add_generation_prompt=prompt, date_string=_DATE
        )
        return str(text)

    text = render(len(messages), prompt=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [False] * len(encoded["input_ids"])
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(index, prompt=True) if index else None
        until = render(index + 1, prompt=False)
        if before is None or not until.startswith(before) or not text.startswith(until):
            raise DataError(
                f"{where}: the chat template has no {{% generation %}}, and renders message {index} differently with "
                f"and without the messages around it, so the assistant's tokens cannot be found; {_ADD_GENERATION}"
            )
        for token, (start, end) in enumerate(encoded["offset_mapping"]):
            inside = max(start, len(before)) < min(end, len(until))
            if inside and not len(before) <= start <= end <= len(until):
                raise DataError(
                    f"{where}: token {text[start:end]!r} is partly the assistant's in message {index}, and the chat "
                    f"template has no {{% generation %}} that settles it; {_ADD_GENERATION}"
                )
            mask[token] = mask[token] or inside
    return encoded["input_ids"], mask
