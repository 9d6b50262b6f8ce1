"""Chat templates: which one is used, which are refused before any row is read, and the text they render."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config.sections.data import DATE, DataConfig, DatasetConfig, PromptSettings
from raytune_fsdp.config.sections.formats import becomes_chat
from raytune_fsdp.data.rows.sandbox import SANDBOX, LimitError, TimeLimitError
from raytune_fsdp.data.rows.template_program import Span
from raytune_fsdp.data.sources.source import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys that may hold the reasoning of a message. Templates read the first; gpt-oss's reads the second."""

_SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

# The largest templates of models have 30,000 characters. Compiling one takes about 10 us for each of them.
_MOST_CHARACTERS = 200_000
_WAY_OUT = "correct it, or name another one in data.chat_template"

KEPT = "raytune_fsdp"
"""The argument of a tokenizer, and so the key in its `tokenizer_config.json`, that holds a run's `PromptSettings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateChoice:
    """What the config says of the template of a dataset."""

    text: str | None = None
    """The template; None: the tokenizer's own."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What it gets besides the conversation."""
    date: str = DATE
    """What it gets as today's date. The data must not depend on the day it is read."""

    @classmethod
    def of(cls, data: DataConfig, dataset: DatasetConfig | None = None) -> TemplateChoice:
        """Return what the config says of a dataset's template, or of the run's."""
        name, variables = data.chat_template, data.chat_template_kwargs
        if dataset is not None and dataset.chat_template is not None:
            name = dataset.chat_template
        if dataset is not None and dataset.chat_template_kwargs is not None:
            variables = dataset.chat_template_kwargs
        text = None if name is None else load_template(name)
        return cls(text=text, variables=variables, date=data.chat_template_date)

    @classmethod
    def of_prompts(cls, data: DataConfig) -> TemplateChoice:
        """Return what prompts are rendered with: as all chats of training; where these differ, as the run says."""
        choices = [cls.of(data, dataset) for dataset in data.train if becomes_chat(dataset.format)]
        return choices[0] if choices and all(each == choices[0] for each in choices) else cls.of(data)

    @classmethod
    def kept_in(cls, tokenizer: PreTrainedTokenizerBase) -> TemplateChoice:
        """Return what `keep_in` left in a tokenizer, which may have been saved and loaded since."""
        try:
            kept = PromptSettings.model_validate(tokenizer.init_kwargs.get(KEPT, {}))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([KEPT, *(str(each) if str(each).isidentifier() else shown(each) for each in first["loc"])])
            # A rule's message has the whole value.
            why = first["msg"].replace(repr(first["input"]), shown(first["input"]))
            raise DataError(
                f"{shorten(where)} in tokenizer_config.json of {tokenizer.name_or_path} says how prompts are rendered, "
                f"and is not what an export writes ({shorten(why, limit=300)}): correct it, or remove it"
            ) from None
        return cls(variables=kept.chat_template_kwargs, date=kept.chat_template_date)

    def keep_in(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Have a tokenizer keep all this, also when it is saved, so that a model is asked as it was trained."""
        if self.text is not None:
            tokenizer.chat_template = self.text
        kept = PromptSettings(chat_template_kwargs=dict(self.variables), chat_template_date=self.date)
        tokenizer.init_kwargs.pop(KEPT, None)  # of the run whose export this one begins with
        if said := kept.model_dump(exclude_defaults=True):
            tokenizer.init_kwargs[KEPT] = said


def is_shipped(name_or_path: str) -> bool:
    """Return whether this is the name of a template that comes with this package."""
    return name_or_path in _SHIPPED


def load_template(name_or_path: str) -> str:
    """Return the text of a template: one shipped with this package (by name), or a file."""
    path = _SHIPPED.get(name_or_path, Path(name_or_path))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = get_close_matches(name_or_path, _SHIPPED, n=1)
        meant = f"; nearest: {near[0]}" if near else ""
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"data.chat_template={name_or_path!r} cannot be read ({why}); it must be a text file with a Jinja "
            f"template, or one of {', '.join(_SHIPPED)}{meant}"
        ) from None


class Refused(Exception):
    """The template rejects this conversation; the message says why."""


class TooMuchWork(DataError):
    """The template takes more than any template may (see `sandbox`). Never a RowError: such rows are not left out."""


class TooSlow(TooMuchWork):
    """It takes more time, which another machine might not: nothing that a run remembers may follow from it."""


class ChatTemplate:
    """A template with the tokenizer's special tokens. `tags`: whether `{% generation %}` marks generated text in it.

    `words`: every name and string literal in its code. `looked_for`: what it looks for in the contents of messages.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], *, date: str = DATE) -> None:
        if len(source) > _MOST_CHARACTERS:
            raise DataError(
                f"the chat template has {len(source)} characters, at most {_MOST_CHARACTERS} are read; {_WAY_OUT}"
            )
        self._source, self._date = source, date
        kind, found = self._ask(None)
        if kind == "invalid":
            raise DataError(f"the chat template {found}; {_WAY_OUT}")
        self.tags, inside, words, looked_for = found
        self.words, self.looked_for = frozenset(words), tuple(looked_for)
        if inside is not None:
            # transformers takes a span's place from the characters printed so far, and such a Jinja block is printed
            # only at its end.
            raise DataError(
                f"the chat template has {{% generation %}} inside another block (line {inside}: a macro, call, "
                "filter, set or generation), where its place in the text is not known; move it out of that block in a "
                "copy of the template and name that file in data.chat_template"
            )
        year, month, day = date.split("-")
        given = {"date_string": f"{day} {_MONTHS[int(month) - 1]} {year}", "documents": None}
        self._variables = plain({**given, **variables})

        self._key = source, date, json.dumps(self._variables, sort_keys=True, default=str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatTemplate) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text, and the spans in `{% generation %}`.

        Messages and tools are plain data, with the messages' reasoning under all its names: see `as_templates_see`.
        `prompt`: append the header of the assistant's next turn.
        """
        return self._result(self._ask(self._given(messages, tools, prompt)))

    def render_all(
        self, conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]]
    ) -> list[tuple[str, list[Span]] | None]:
        """Render several conversations in one request, which is faster. None for one to be rendered by itself."""
        variables = [self._given(messages, tools, prompt=False) for messages, tools in conversations]
        try:
            answers = SANDBOX.ask_all(self._source, variables, date=self._date)
        except LimitError:
            return [None] * len(variables)
        return [self._result(answer) if answer[0] == "done" else None for answer in answers]

    def _given(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, prompt: bool
    ) -> dict[str, Any]:
        return {**self._variables, "messages": messages, "tools": tools, "add_generation_prompt": prompt}

    def _result(self, answer: tuple[str, Any]) -> tuple[str, list[Span]]:
        kind, found = answer
        if kind == "refused":
            raise Refused(shorten(found, limit=500))
        if kind == "failed":
            raise DataError(f"the chat template fails: {shorten(found, limit=500)}; {_WAY_OUT}")
        text, spans = found
        return text, [(start, end) for start, end in spans]

    def _ask(self, variables: Mapping[str, Any] | None) -> tuple[str, Any]:
        try:
            return SANDBOX.ask_all(self._source, None if variables is None else [variables], date=self._date)[0]
        except LimitError as error:
            kind = TooSlow if isinstance(error, TimeLimitError) else TooMuchWork
            raise kind(f"the chat template does too much work: {error}; {_WAY_OUT}") from None

    def trains_an_end(self) -> bool:
        """Return whether anything after the assistant's words is trained on; if not, a model does not learn to stop."""
        try:
            text, spans = self.render(
                [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}], None
            )
        except (Refused, DataError):  # with rows it may do well
            return True
        return not (text[: spans[-1][1]] if spans else text).endswith("Yes.")


def chat_template(tokenizer: PreTrainedTokenizerBase, choice: TemplateChoice, *, tools: bool = False) -> ChatTemplate:
    """Return the template that renders conversations: the chosen one, otherwise the tokenizer's own."""
    try:
        source = tokenizer.get_chat_template(tools=[] if tools else None) if choice.text is None else choice.text
    except ValueError:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, which conversations need; set "
            f"data.chat_template to one of {', '.join(_SHIPPED)} or a file with a Jinja template, or use another format"
        ) from None
    return ChatTemplate(source, {**tokenizer.special_tokens_map, **choice.variables}, date=choice.date)


def as_templates_see(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of plain data, each with its reasoning under the names that templates read."""
    return [_with_reasoning(plain(message)) for message in messages]


def plain(value: Any) -> Any:
    """Return data that JSON has. Anything else a file may hold is only named, as `<datetime>`, as in transformers."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return kind(map(plain, value)) if kind in (list, tuple) else [plain(item) for item in value]
    if isinstance(value, str):  # these without the methods of their own class
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return plain(value.item()) if isinstance(value, np.generic) else f"<{kind.__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    given = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}
