"""Read a row as a conversation: messages as chat templates expect them, whatever names the file uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config.sections.formats import FUNCTIONS, ChatFormat
from raytune_fsdp.data.mixture import FOURTH_ORDER, ORDER_VERSION
from raytune_fsdp.data.rows.templates import REASONING_KEYS
from raytune_fsdp.data.rows.thoughts import without_thought
from raytune_fsdp.data.sources.source import JsonText, shorten

SYSTEM_ROLES = ("system", "developer")
ROLES = ("system", "developer", "user", "assistant", "tool")

_USUAL_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
# In ShareGPT files a call is a message of its own, whose text is the call as JSON.
_CALLS = ("function_call", "tool_call")
_CALL_KEYS = ("tool_calls", "function_call")
_WORDS = ("id", "name", "type", "description")
"""Keys in calls and tools whose numbers are words."""


_DEEPEST = 300
"""Levels in a message or its tools. Python allows 1,000 calls in each other, of which each level takes two; after some
imports it allows more, and a row must be bad everywhere or nowhere."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template, and which messages may be trained on."""

    messages: list[dict[str, Any]]
    train: list[bool]
    tools: list[dict[str, Any]] | None
    where: str
    column: str
    first: int = 0
    """Place of the column's first message in `messages`."""
    keep: bool = False
    """Whether all reasoning must be in the text."""

    def place(self, index: int) -> str:
        """Return the name of a message in errors."""
        return f"{self.column}[{index - self.first}]" if index >= self.first else "the system message"


def read_conversation(
    row: dict[str, Any], format: ChatFormat, where: str, *, columnar: bool = False, order: int = ORDER_VERSION
) -> Conversation:
    """Return the conversation of a row. Raises RowError.

    `columnar`: a null means a missing key everywhere in the row; otherwise only in messages and calls. `order`: the
    version by whose rules rows are read.
    """
    newer, column = order >= FOURTH_ORDER, format.messages
    messages, train = _read_messages(row, column, "messages", format, where, deep=columnar, newer=newer)
    if format.prompt is not None:
        ahead, may = _read_messages(row, format.prompt, "prompt", format, where, deep=columnar, newer=newer)
        messages, train = ahead + messages, [each and format.loss == "all" for each in may] + train
        column = f"{format.prompt} + {column}"
    tools = _tools_of(row, format, where, columnar=columnar, newer=newer)
    _check_depth([tools], f"{where}: {format.tools}")
    system = _system_beside(row, format, messages, where) if newer else None
    keep = format.reasoning == "keep"
    if system is None:
        return Conversation(messages, train, tools, where, column, keep=keep)
    if messages[0]["role"] in SYSTEM_ROLES:  # that one is empty
        messages, train = messages[1:], train[1:]
    return Conversation([system, *messages], [True, *train], tools, where, column, first=1, keep=keep)


def _read_messages(
    row: dict[str, Any], column: str, field: str, format: ChatFormat, where: str, *, deep: bool, newer: bool
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages of a column, and which may be trained on. `field`: that of the format that names it."""
    given = read_column(row, column, field, where)
    if newer and isinstance(given, str):
        # As with tools: a text is JSON, where a null is a value.
        given, deep = _parse(given, f"{where}: {column}", "a list of messages"), False
    if not isinstance(given, list):
        raise RowError(
            f"{where}: {column}={shorten(given)} is not a list of messages; "
            'each row needs [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]',
            "wrong_type",
        )
    if not given:
        raise RowError(f"{where}: {column}=[] has no messages; correct or remove the row", "empty")
    messages, train = [], []
    for index, message in enumerate(given):
        place = f"{where}: {column}[{index}]"
        inner = deep and not isinstance(message, JsonText)  # in JSON, a null is a value
        message = _parse(message, place, "a message") if isinstance(message, JsonText) else message
        if not isinstance(message, dict):
            raise RowError(
                f"{place}={shorten(message)} is not an object; a message needs a role and a content", "wrong_type"
            )
        _check_depth(message, place)
        # In Arrow and Parquet every message has the keys of all messages, most of them null: "tool_calls": null.
        message = _of_columns(message) if inner else _without_nulls(message)
        if inner:  # with the JSON in it
            _check_depth(message, place)
        train.append(_is_trained(message, place, newer))
        messages.append(_read_message(message, format, place))
    return messages, train


def _check_depth(value: Any, place: str) -> None:
    """Refuse a value whose lists and objects lie too deep in each other."""
    if _is_deep(value):
        raise RowError(f"{place}: is nested more than {_DEEPEST} levels deep; correct or remove the row", "nested")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list | tuple)]
        if not level:
            return False
    return True


def _is_trained(message: dict[str, Any], place: str, newer: bool) -> bool:
    """Return whether a message may be trained on. Removes the keys that say so."""
    trained = True
    for key in ("train", "training") if newer else ("train",):
        given = message.pop(key, True)
        if not isinstance(given, bool):
            raise RowError(f"{place}.{key}={shorten(given)} is not true or false; correct the row", "wrong_type")
        trained = trained and given
    weight = message.pop("weight", 1) if newer else 1
    if type(weight) not in (int, float) or weight not in (0, 1):
        raise RowError(
            f"{place}.weight={shorten(weight)} is neither 0 nor 1, and a message is trained on or not; correct the row",
            "wrong_type",
        )
    return trained and weight == 1


def _system_beside(
    row: dict[str, Any], format: ChatFormat, messages: list[dict[str, Any]], where: str
) -> dict[str, Any] | None:
    """Return the system message from a column of its own; None if there is none, or the conversation begins with it."""
    given = None if format.system is None else row.get(format.system)
    if given is None or (isinstance(given, str) and not given.strip()):
        return None
    place = f"{where}: {format.system}"
    way_out = "or set the dataset's format.system to null if the column is something else"
    if not isinstance(given, str):
        raise RowError(f"{place}={shorten(given)} is not text; correct the row, {way_out}", "wrong_type")
    check_unicode(given, place)
    own = messages[0]["content"].strip() if messages[0]["role"] in SYSTEM_ROLES else ""
    if own and own != given.strip():
        raise RowError(
            f"{place}={shorten(given)} is another system message than that of {format.prompt or format.messages}[0]; "
            f"correct the row, {way_out}",
            "wrong_type",
        )
    return None if own else {"role": "system", "content": given}


def _instruction(*columns: str) -> str:
    """Return the way out for rows of a question and an answer. `columns`: the fields that name theirs."""
    fields = ", ".join(("type: instruction", *columns, "style: chat"))
    return f"set the dataset's format to {{{fields}}}, or with style: plain where the tokenizer has no chat template"


_FORMATS = (
    (("chosen", "rejected"), "set the dataset's format to {type: preference}, for train.objective.type=dpo and others"),
    (("prompt", "completion", "label"), "set the dataset's format to {type: binary}, for train.objective.type=kto"),
    (("instruction", "output"), _instruction()),
    (("instruction", "context", "response"), _instruction("input: context", "completion: response")),
    (("instruction", "response"), _instruction("completion: response")),
    (("messages",), "set the dataset's format to {type: chat}, which reads conversations"),
    (("conversations",), "set the dataset's format to {type: chat, messages: conversations}"),
    (("prompt", "completion"), _instruction("prompt: prompt", "completion: completion")),
    (("question", "answer"), _instruction("prompt: question", "completion: answer")),
    (("query", "response"), _instruction("prompt: query", "completion: response")),
    (("input_ids",), "set the dataset's format to {type: tokens}"),
    (
        ("text", "label"),
        "set the dataset's format to {type: score, text: text, label: label}, for train.objective.type=classification, "
        "or to {type: completion}, which trains on texts",
    ),
    (("text",), "set the dataset's format to {type: completion}, which trains on texts"),
)
"""What usual columns are read by."""
MISSING_COLUMN = "missing_column"
"""Why a row cannot be used that lacks a column which its format reads."""
_BY_DEFAULT = ("messages", "instruction", "output", "text", "input_ids")
_OF_ANSWERS = ("chosen", "rejected", "completion", "label")
"""By default, columns of pairs and of judged answers: what has chosen one takes the other."""


def of_lists(prompt: str, completion: str) -> str:
    """Return the way out for rows whose prompt and completion are lists of messages, as TRL's are."""
    return (
        f"for lists of messages, set the dataset's format to {{type: chat, prompt: {prompt}, messages: {completion}}}"
    )


def _other_format(row: dict[str, Any], name: str, field: str) -> str | None:
    """Return the format that reads a row which lacks a column; None: only its owner can know."""
    formats = _FORMATS if name in _BY_DEFAULT else _FORMATS[:2] if name in _OF_ANSWERS else ()
    found = next((each for each in formats if all(map(row.__contains__, each[0]))), None)
    if found is not None:
        lists = found[0] == ("prompt", "completion") and are_messages(row["prompt"])
        return of_lists(*found[0]) if lists else found[1]
    if field != "messages" or not row or any(_may_be_messages(value) for value in row.values()):
        return None
    return (
        "no column holds a list of messages: set the dataset's format to {type: instruction, prompt: COLUMN, "
        "completion: COLUMN, style: chat} or {type: template, prompt: TEXT, completion: TEXT}"
    )


def are_messages(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(each, dict) for each in value)


def _may_be_messages(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip()[:1] == "[")


def read_column(row: dict[str, Any], name: str, field: str, where: str, *, guess: bool = True) -> Any:
    """Return the value of a column that every row needs. `field`: the field of the format that names the column.

    `guess`: whether another format may be meant where it is missing.
    """
    if name not in row:
        other = _other_format(row, name, field) if guess else None
        raise RowError(
            f"{where}: has no column {name!r}, it has {shorten(', '.join(map(repr, row)) or 'none')}; "
            + (other or f"name the right one in the dataset's format.{field}"),
            MISSING_COLUMN,
        )
    if row[name] is None:
        raise RowError(f"{where}: column {name!r} is null; correct or remove the row", "null")
    return row[name]


def check_text(value: Any, place: str, *, may_be_empty: bool = False) -> str:
    """Return the value unchanged if it is text that a tokenizer accepts. Raises RowError otherwise."""
    if value is None:
        raise RowError(f"{place} is missing or null, not text; correct or remove the row", "null")
    if not isinstance(value, str):
        raise RowError(
            f"{place}={shorten(value)} is not text but {type(value).__name__}; correct or remove the row", "wrong_type"
        )
    if not may_be_empty and (not value or value.isspace()):
        raise RowError(f"{place}={shorten(repr(value))} is empty; correct or remove the row", "empty")
    check_unicode(value, place)
    return value


def check_unicode(value: str, place: str) -> None:
    """Refuse text that UTF-8 cannot express: JSON can spell half a surrogate pair, and no tokenizer accepts one."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{place} has half a surrogate pair, {value[error.start]!r}, at character {error.start}; "
            "correct or remove the row",
            "invalid_utf8",
        ) from None


def _read_message(message: dict[str, Any], format: ChatFormat, place: str) -> dict[str, Any]:
    role_key = _role_key(message, format.role)
    # Columns that are null are dropped where rows are read: the role's name says which one is missing.
    usual = "content" if "content" in message or ("value" not in message and role_key == "role") else "value"
    content_key = format.content or usual
    given = message.pop(role_key, None)
    role = _read_role(given, format, f"{place}.{role_key}")
    content = message.pop(content_key, None)
    place_of_content = f"{place}.{content_key}"
    if isinstance(content, list):
        content = _join_parts(content, place_of_content)
    if given in _CALLS and given not in format.roles:
        # Not if the user mapped this role: then the message is words, whatever its role is called.
        calls = _parse(check_text(content, place_of_content), place_of_content, "a call as JSON")
        message["tool_calls"], content = calls if isinstance(calls, list) else [calls], None
    elif "function_call" in message:
        message["tool_calls"] = [message.pop("function_call")]
    whole = content
    if format.reasoning == "drop" and role == "assistant":
        content = without_thought(content) if isinstance(content, str) else content
        message = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _read_calls(calls, role, f"{place}.tool_calls")
    if calls and (content is None or (isinstance(content, str) and not content.strip())):
        content = content or ""  # templates concatenate it: None would be an error, or the word "None"
    else:
        if content == "" != whole:
            raise RowError(
                f"{place_of_content}={shorten(whole)} is a thought and nothing else, which format.reasoning=drop takes "
                "out; remove the row, or set the dataset's format.reasoning to template or keep",
                "empty",
            )
        # Many files have a system message in every row, empty or not, and a tool may return nothing.
        check_text(content, place_of_content, may_be_empty=role in ("system", "developer", "tool"))
    for key in REASONING_KEYS:
        if key in message and not check_text(message[key], f"{place}.{key}", may_be_empty=True).strip():
            del message[key]
    return {**message, "role": role, "content": content}


def _role_key(message: Mapping[str, Any], own: str | None) -> str:
    return own or ("role" if "role" in message else "from")


def _read_role(given: Any, format: ChatFormat, place: str) -> str:
    if isinstance(given, str):
        role = format.roles.get(given) or _USUAL_ROLES.get(given)
        if role in ROLES:
            return role
    raise RowError(
        f"{place}={shorten(given)} is missing or unknown; it must be one of {', '.join(ROLES)}, or be mapped by "
        "format.roles",
        "unknown_role",
    )


_NOT_TEXT = re.compile("image|video|(?:input_)?audio")


def _join_parts(parts: list[Any], place: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if seen := _NOT_TEXT.match(kind):
            raise RowError(
                f"{place}[{index}]={shorten(part)} is not text, and only text can be trained on: leave rows with "
                f"{seen[0]} out (data.bad_rows=skip), or train on them with TRL's SFTTrainer, which reads such rows",
                "wrong_type",
            )
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise RowError(
                f'{place}[{index}]={shorten(part)} is not {{"type": "text", "text": "…"}}; only text can be trained '
                "on: correct or remove the row",
                "wrong_type",
            )
        texts.append(part["text"])
    return "".join(texts)


def _read_calls(calls: Any, role: str, place: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise RowError(
            f"{place}: only the assistant calls tools, this message's role is {role}; correct the row", "wrong_type"
        )
    if isinstance(calls, str):
        calls = _parse(calls, place, "a list of calls")
    if not isinstance(calls, list):
        raise RowError(f"{place}={shorten(calls)} is not a list of calls; correct the row", "wrong_type")
    return [_read_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _read_call(call: Any, place: str) -> dict[str, Any]:
    call = _without_nulls(call)
    function = _without_nulls(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(
            f'{place}={shorten(call)} is not a call; it needs {{"function": {{"name": "…", "arguments": {{…}}}}}}',
            "wrong_type",
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        # Templates write arguments as JSON themselves: text that is already JSON would be quoted a second time.
        arguments = _parse(arguments, f"{place}.function.arguments", "an object")
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(
            f"{place}.function.arguments={shorten(arguments)} is not an object; correct the row", "wrong_type"
        )
    around = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **around, "function": {**function, "arguments": arguments}}


def _tools_of(
    row: dict[str, Any], format: ChatFormat, where: str, *, columnar: bool, newer: bool
) -> list[dict[str, Any]] | None:
    if format.tools is None:
        return None
    tools = _read_tools(row.get(format.tools), f"{where}: {format.tools}", columnar=columnar)
    if tools is None and newer and format.tools != FUNCTIONS:
        functions = _read_tools(row.get(FUNCTIONS), f"{where}: {FUNCTIONS}", columnar=columnar)
        if functions is not None:
            tools = [each if "function" in each else {"type": "function", "function": each} for each in functions]
    return tools


def _read_tools(tools: Any, place: str, *, columnar: bool) -> list[dict[str, Any]] | None:
    # Done before texts in it are parsed: those are JSON, where a null is a value.
    tools = _of_columns(tools, texts=False) if columnar else tools
    if isinstance(tools, str):
        tools = _parse(tools, place, "a list of JSON schemas") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if isinstance(tools, list):
        tools = [
            _parse(tool, f"{place}[{i}]", "a JSON schema") if isinstance(tool, str) else tool
            for i, tool in enumerate(tools)
        ]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            f"{place}={shorten(tools)} is not a list of JSON schemas; correct the row, or set the dataset's "
            "format.tools to null if the column holds something else",
            "wrong_type",
        )
    return tools


def _parse(text: str, place: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"{place}={shorten(text)} is not {what} as JSON ({error}); correct the row", "wrong_type"
        ) from None


def messages_in(text: JsonText, role: str | None, roles: Mapping[str, Any]) -> str | list[JsonText]:
    """Return the messages of a column that has texts in other rows, each as JSON; or else the text.

    `role`: the key of roles, if it is not one of the usual ones. `roles`: those that the format names.
    """
    found = _parsed(text)
    messages = [found] if isinstance(found, dict) else found
    known = [*roles, *_USUAL_ROLES]
    if are_messages(messages) and all(each.get(_role_key(each, role)) in known for each in messages):
        return [JsonText(json.dumps(each)) for each in messages]
    return text


def _of_columns(value: Any, *, texts: bool = True, key: str = "") -> Any:
    """Return a value of columns without keys whose value is null, at any depth, and with the JSON in it read.

    With `texts`, only lists of parts are read outside of calls: all other JSON may be a text that looks like it.
    """
    if isinstance(value, JsonText):
        found = _parsed(value)
        is_read = _are_parts(found) if texts else key not in _WORDS or isinstance(found, dict | list)
        return found if is_read else str(value)
    if isinstance(value, dict):
        return {
            name: read
            for name, item in value.items()
            if (read := _of_columns(item, texts=texts and name not in _CALL_KEYS, key=name)) is not None
        }
    return [_of_columns(item, texts=texts) for item in value] if isinstance(value, list) else value


def _parsed(text: JsonText) -> Any:
    """Return what JSON says; the text itself if it is not JSON, or so deep that not every process can read it."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if not _is_deep([found]):
            return found
    return str(text)


def _are_parts(value: Any) -> bool:
    if not are_messages(value):
        return False
    texts = [part.get("type") == "text" and isinstance(part.get("text"), str) for part in value]
    return any(texts) or all(_NOT_TEXT.match(str(part.get("type"))) for part in value)


def _without_nulls(value: Any) -> Any:
    """Return the object without keys whose value is null."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
