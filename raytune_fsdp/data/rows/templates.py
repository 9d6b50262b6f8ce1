"""Chat templates: which one is used, which ones are refused before any row is read, and the text they render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raytune_fsdp.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""A range of characters of a text: start and end, as in a slice."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys that may hold the reasoning of a message. Templates read the first; gpt-oss's reads the second."""

_SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}

# Some templates (Llama 3.2) print today's date unless given one; the data must not depend on the day it is read.
DATE = "26 Jul 2024"

# transformers keeps one compiled template per process, and in it the generation spans found so far: two threads that
# rendered at once got each other's spans, so rows got wrong masks. Rendering holds Python's lock anyway.
_RENDERING = Lock()

# What a template's code can raise when it was not written for a row like this one.
_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def load_template(name_or_path: str) -> str:
    """The text of a template: one shipped with this package (by name), or a file."""
    path = _SHIPPED.get(name_or_path, Path(name_or_path))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = get_close_matches(name_or_path, _SHIPPED, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise DataError(
            f"data.chat_template={name_or_path!r} cannot be read ({error}); it must be a text file with a Jinja "
            f"template, or one of {', '.join(_SHIPPED)}{meant}"
        ) from None


class Refused(Exception):
    """The template rejects this conversation; the message says why."""


class ChatTemplate:
    """A template with the tokenizer's special tokens. `tags`: whether it marks generated text by `{% generation %}`."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.tags, self.words = _analyze(source)
        self._variables = {**variables, "date_string": DATE}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and the spans in `{% generation %}`. `prompt`: append the header of the assistant's next turn."""
        # Imported here: processes that only read the cache start in 0.9 s without transformers, 1.9 s with.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _RENDERING:
                texts, spans = render_jinja_template(
                    conversations=[[_with_reasoning(message) for message in messages]],
                    tools=tools,
                    chat_template=self.source,
                    return_assistant_tokens_mask=self.tags,
                    add_generation_prompt=prompt,
                    **self._variables,
                )
        except _REFUSALS as error:
            raise Refused(" ".join(str(error).split()) or type(error).__name__) from error
        return texts[0], spans[0] if self.tags else []

    def trains_an_end(self) -> bool:
        """Whether anything after the assistant's words is trained on; if not, a model does not learn to stop."""
        try:
            text, spans = self.render(
                [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}], None
            )
        except Refused:
            return True
        return not (text[: spans[-1][1]] if spans else text).endswith("Yes.")


def chat_template(tokenizer: PreTrainedTokenizerBase, text: str | None, *, tools: bool = False) -> ChatTemplate:
    """The template that renders conversations: the given one, otherwise the tokenizer's own."""
    try:
        source = tokenizer.get_chat_template(tools=[] if tools else None) if text is None else text
    except ValueError:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, which conversations need; set "
            f"data.chat_template to one of {', '.join(_SHIPPED)} or a file with a Jinja template, or use another format"
        ) from None
    if "strftime_now" in source and "date_string" not in source:
        raise DataError(
            "the chat template prints the current date (strftime_now), so the same data would be different tomorrow; "
            "write a fixed date into a copy of the template and name that file in data.chat_template"
        )
    return ChatTemplate(source, tokenizer.special_tokens_map)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning under the names that templates read. transformers 5.17 leaves this to us."""
    given = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


class _Generation(Extension):
    """Parses `{% generation %}`, as the extension of transformers that renders it does."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)


def _analyze(source: str) -> tuple[bool, frozenset[str]]:
    """Whether the template has generation tags, and every name and string literal in its code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    try:
        tree = environment.parse(source)
        environment.compile(source)  # parse alone accepts filters and tests that do not exist
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not valid Jinja: {error.message} (line {error.lineno}); "
            "correct it, or name another one in data.chat_template"
        ) from None
    for outer in tree.find_all((nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)):
        if any(_is_generation(inner) for inner in outer.find_all(nodes.CallBlock)):
            # transformers takes a span's place from the characters printed so far, and such a block is printed only at
            # its end.
            raise DataError(
                f"the chat template has {{% generation %}} inside another block (line {outer.lineno}: a macro, call, "
                "filter, set or generation), where its place in the text is not known; move it out of that block in a "
                "copy of the template and name that file in data.chat_template"
            )
    words = {node.name for node in tree.find_all(nodes.Name)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return any(_is_generation(node) for node in tree.find_all(nodes.CallBlock)), frozenset(words)


def _is_generation(node: nodes.CallBlock) -> bool:
    return isinstance(node.call.node, nodes.ExtensionAttribute)
