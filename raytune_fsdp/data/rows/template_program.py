"""Render chat templates: a program, which `sandbox.py` starts in a process of its own and asks.

Filters, globals, tags and errors are those of transformers, in Jinja's own sandbox. A template is a stranger's program:
`"x" * 10**9`, two nested loops over `range(100000)` or a list put twice into itself forty times would take all memory
or all day. So the kernel limits what this process may take for each request. It imports only Jinja and the standard
library.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import IO, Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Span = tuple[int, int]
"""A range of characters of a text: start and end, as in a slice."""

NO_MEMORY = 12
"""The exit code of this process when a template has met the limit of its memory."""

# What a template's code can raise when it was not written for a row like this one.
_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# Literals in these places decide nothing about a message's text: keys, roles and types, and what is only written.
_KEYS = {
    "arguments", "assistant", "content", "description", "developer", "function", "id", "name", "parameters",
    "reasoning", "reasoning_content", "role", "system", "text", "thinking", "tool", "tool_call_id", "tool_calls",
    "type", "user",
}  # fmt: skip
_NAMING = {"name", "role", "type"}
_WRITERS = {
    "d", "default", "dictsort", "format", "get", "groupby", "indent", "join", "map", "raise_exception", "reject",
    "rejectattr", "select", "selectattr", "sort", "strftime_now", "sum", "tojson", "unique",
}  # fmt: skip


class Template:
    """A compiled template, with an environment of its own, which notes what was written so far."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        self._tree = self._environment.parse(source)
        self._template = self._environment.from_string(source)

    def about(self) -> tuple[bool, int | None, list[str], list[str]]:
        """Return whether it has generation tags, the line of a Jinja block that has one inside, words, and looked for.

        Words: every name and every string literal in its code. Looked for: the literals that it looks for in a text.
        """
        tree, inside = self._tree, None
        for outer in tree.find_all((nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)):
            if inside is None and any(_is_generation(inner) for inner in outer.find_all(nodes.CallBlock)):
                inside = outer.lineno
        words = {node.name for node in tree.find_all(nodes.Name)}
        words |= {node.attr for node in tree.find_all(nodes.Getattr)}
        words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        tags = any(_is_generation(node) for node in tree.find_all(nodes.CallBlock))
        return tags, inside, sorted(words), sorted(_looked_for(tree))

    def render(self, variables: Mapping[str, Any], date: str) -> tuple[str, list[Span]]:
        """Return the text, and the spans in `{% generation %}`. Raises whatever the template does."""
        written, spans = self._environment.begin(date)
        for piece in self._template.generate(variables):
            written.append(piece)
        return "".join(written), spans


def _is_generation(node: nodes.CallBlock) -> bool:
    return isinstance(node.call.node, nodes.ExtensionAttribute)


def _looked_for(tree: nodes.Template) -> set[str]:
    """Return the literals that may decide what is written: all but those that are only written themselves.

    A template looks for a text in many ways: `in`, `==`, `split`, a filter, all of them also by a variable.
    """
    found = {each for each in _deciding(tree, written=False) if isinstance(each, str)}
    # White space at the ends of a text is in sight wherever the text is.
    return {each for each in found if each.strip()} - _KEYS


def _deciding(node: nodes.Node, *, written: bool) -> Iterator[Any]:
    """Yield the literals in a node. `written`: the node itself is written, so a literal decides nothing there."""
    if isinstance(node, nodes.Const):
        if not written:
            yield node.value
        return
    if isinstance(node, nodes.Compare) and any(_names(each) for each in (node.expr, *(op.expr for op in node.ops))):
        return
    if isinstance(node, nodes.Assign):
        # What is put together is to be written.
        if not _names(node.target):
            yield from _deciding(node.node, written=isinstance(node.node, nodes.Add | nodes.Concat))
        return
    if isinstance(node, nodes.AssignBlock):  # {% set end %}</think>{% endset %}
        yield from (data.data.strip() for data in node.find_all(nodes.TemplateData))
    for field, value in node.iter_fields():
        inside = _is_written(node, field, written)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, nodes.Node):
                yield from _deciding(child, written=inside)


_PASSING = (
    nodes.Add, nodes.Concat, nodes.CondExpr, nodes.Dict, nodes.Filter, nodes.Getattr, nodes.Keyword, nodes.Pair,
    nodes.Tuple,
)  # fmt: skip


def _is_written(node: nodes.Node, field: str, written: bool) -> bool:
    """Return whether what is in this field of a node is only written, or a key. `written`: whether the node is."""
    if isinstance(node, nodes.Output) or (isinstance(node, nodes.Getitem | nodes.Pair) and field in ("arg", "key")):
        return True
    called = node.node if isinstance(node, nodes.Call) else node
    # The node of `text | join` is a text; that of `text.join` is most often a literal.
    is_called = isinstance(node, nodes.Call) or (isinstance(node, nodes.Filter) and field != "node")
    if is_called and getattr(called, "attr", getattr(called, "name", None)) in _WRITERS:
        return True
    return written and isinstance(node, _PASSING) and field not in ("test", "args", "kwargs")


def _names(node: nodes.Node) -> bool:
    """Return whether a node is a role, a type or a name, which is not a text of a message."""
    if isinstance(node, nodes.Getattr):
        return node.attr in _NAMING
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value in _NAMING
    return isinstance(node, nodes.Name) and "role" in node.name


class _GenerationTag(Extension):
    """The tag `{% generation %}` … `{% endgeneration %}`, which notes where the text between them is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller: Callable[[], str]) -> str:
        text = caller()
        assert isinstance(self.environment, _Environment)
        start = sum(map(len, self.environment.written))
        self.environment.spans.append((start, start + len(text)))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=(_GenerationTag, loopcontrols))
        self.begin("1970-01-01")
        self.filters["tojson"] = _tojson
        # These write different text every time they are called, so the same data would be different tomorrow.
        del self.filters["random"], self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=self._strftime_now, dict=_Dict(), namespace=_Namespace
        )

    def begin(self, date: str) -> tuple[list[str], list[Span]]:
        """Begin a rendering on this date; return the lists that will hold its text and the spans in it."""
        self._now = datetime.fromisoformat(date)
        self.written: list[str] = []
        self.spans: list[Span] = []
        return self.written, self.spans

    def _strftime_now(self, format: str) -> str:
        return self._now.strftime(format)


class _Dict:
    """The `dict` of templates, which gives them nothing of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """The `namespace` of templates, which stores nothing under names with a leading underscore, Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store {name!r} on a namespace; rename it")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes <, > and & for HTML.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    """Compile a template, once: several datasets use the same one."""
    return Template(source)


def send(stream: IO[bytes], content: bytes) -> None:
    """Write bytes with their number in front."""
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def read_exactly(stream: IO[bytes], count: int) -> bytes:
    """Read this number of bytes. Raises EOFError if there are fewer."""
    content = stream.read(count)
    if len(content) < count:
        raise EOFError
    return content


def read_count(stream: IO[bytes]) -> int:
    """Read the number of bytes that `send` wrote in front."""
    return int.from_bytes(read_exactly(stream, 8), "little")


def as_bytes(answers: list[tuple[str, Any]]) -> bytes:
    """Return answers as JSON. Half of a surrogate pair stays half of one, which rows are refused for."""
    return json.dumps(answers, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _answer(source: str, variables: Sequence[Mapping[str, Any]] | None, date: str) -> list[tuple[str, Any]]:
    try:
        template = compiled(source)
    except TemplateSyntaxError as error:
        return [("invalid", f"is not valid Jinja: {error.message} (line {error.lineno})")]
    except (SyntaxError, ValueError, RecursionError) as error:
        return [("invalid", f"cannot be compiled: {type(error).__name__}: {error}")]
    if variables is None:
        return [("done", template.about())]
    return [_rendered(template, each, date) for each in variables]


def _rendered(template: Template, variables: Mapping[str, Any], date: str) -> tuple[str, Any]:
    try:
        return "done", template.render(variables, date)
    except _REFUSALS as error:
        return "refused", " ".join(str(error).split()) or type(error).__name__
    except RecursionError:
        return "deep", None
    except MemoryError:
        raise
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"


def _limit(memory: int, seconds: float) -> None:
    """Limit memory and processor time from now on."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # a batch system may have set a lower limit
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    # No handler could run in the middle of `2 ** 10**9`; without one, SIGPROF ends the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})  # the process that started this one may block it
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Answer requests until there are no more. Arguments: memory for a request, and for each of its bytes; seconds."""
    memory, memory_per_byte, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A batch system sends these to all processes of a run, which then goes on until it is saved.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    while True:
        try:
            count = read_count(requests)
        except EOFError:
            return
        _limit(own + memory + memory_per_byte * count, seconds)
        try:
            # As JSON: what a template has made is never unpickled.
            answer = as_bytes(_answer(*pickle.loads(read_exactly(requests, count))))
        except MemoryError:
            os._exit(NO_MEMORY)  # at once: what the template has made is still there
        send(answers, answer)


if __name__ == "__main__":
    main()
