"""Chat templates: which one is used, what is refused before any row is read, and the text that it makes of a row."""

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
"""Characters from the first to behind the last."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a row may give a message's reasoning. Templates read the first; gpt-oss's reads the second."""

_SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}

# Some templates (Llama 3.2) print today's date unless told another; the data must not depend on the day it is read.
DATE = "26 Jul 2024"

# transformers keeps one compiled template per process, and in it what was generated so far: two threads that render at
# once would get each other's spans, and with them a wrong mask. Rendering holds Python's lock anyway.
_RENDERING = Lock()

# What the code of a template can raise when a row is not what it was written for.
_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def load_template(name_or_path: str) -> str:
    """The text of a template that comes with this package (by its name), or of a file."""
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
    """The template does not take this conversation; the text says why."""


class ChatTemplate:
    """A template and the tokenizer's special tokens. `tags`: it says by `{% generation %}` what is trained."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.tags, self.words = _analyze(source)
        self._variables = {**variables, "date_string": DATE}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and the spans in `{% generation %}`. `prompt`: with what asks the assistant for its turn."""
        # Here, because processes that only read windows from the cache start in half the time without it.
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
        """Whether something behind the assistant's words is trained on; else a model does not learn to stop."""
        try:
            text, spans = self.render(
                [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}], None
            )
        except Refused:
            return True
        return not (text[: spans[-1][1]] if spans else text).endswith("Yes.")


def chat_template(tokenizer: PreTrainedTokenizerBase, text: str | None, *, tools: bool = False) -> ChatTemplate:
    """The template that conversations are rendered with: the one given, else the tokenizer's own."""
    try:
        source = tokenizer.get_chat_template(tools=[] if tools else None) if text is None else text
    except ValueError:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, conversations need one; set "
            f"data.chat_template to {', '.join(_SHIPPED)} or a file with a Jinja template, or use other formats"
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
    """Reads `{% generation %}`, as the extension of transformers does that renders it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)


def _analyze(source: str) -> tuple[bool, frozenset[str]]:
    """Whether there are generation tags, and every name and literal in the code of the template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    try:
        tree = environment.parse(source)
        environment.compile(source)
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not valid Jinja: {error.message} (line {error.lineno}); "
            "correct it, or name another one in data.chat_template"
        ) from None
    for outer in tree.find_all((nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)):
        if any(_is_generation(inner) for inner in outer.find_all(nodes.CallBlock)):
            # transformers counts the characters printed so far; what such a block holds is printed only after it.
            raise DataError(
                f"the chat template has {{% generation %}} inside another block (line {outer.lineno}: a macro, call, "
                "filter, set or generation), where its place in the text is not known; put it outside of that in a "
                "copy of the template and name that file in data.chat_template"
            )
    words = {node.name for node in tree.find_all(nodes.Name)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return any(_is_generation(node) for node in tree.find_all(nodes.CallBlock)), frozenset(words)


def _is_generation(node: nodes.CallBlock) -> bool:
    return isinstance(node.call.node, nodes.ExtensionAttribute)
