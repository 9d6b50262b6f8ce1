"""Run chat templates: with all that transformers offers them, in a sandbox that also counts their work (see `work`).

Filters, globals, tags and errors are those of transformers, but a template is compiled once and called directly. Its
code is what Jinja generates, except that Jinja blocks charge for what they run, and that operations whose result or
work may be large charge first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, update_wrapper
from string import Formatter
from threading import Lock
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

from raytune_fsdp.data.rows.compiler import ATTRIBUTES_OF_DICTS, SAFE_OF_LOOPS, CountingGenerator
from raytune_fsdp.data.rows.filters import charged_filter, charged_test
from raytune_fsdp.data.rows.work import Work, size_of, whole

Span = tuple[int, int]
"""A range of characters of a text: start and end, as in a slice."""

# Names that templates ask for all the time. Jinja looks for an attribute first, which takes ten times as long for a
# dict.
_SAFE_OF_DICTS = frozenset(("copy", "get", "items", "keys", "values"))
_SAFE_OF_TEXTS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}

_WITHOUT_CODE = frozenset((bool, dict, int, list, str))


class CompiledTemplate:
    """A template's code. Rendering takes its lock: its environment holds what was written and done so far."""

    def __init__(self, source: str) -> None:
        self._environment = environment = _Environment()
        self.tree = environment.parse(source)
        """The template as Jinja reads it."""
        template = environment.from_string(self.tree)
        self._root, self._blocks = template.root_render_func, template.blocks
        self._globals = dict(environment.globals)
        self._lock = Lock()

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Return the text, and the spans in `{% generation %}`. Raises whatever the template does, and WorkExceeded."""
        environment = self._environment
        with self._lock:
            environment.work.begin(lambda: size_of(list(variables.values())))
            written, spans = environment.begin()
            context = environment.context_class(environment, {**self._globals, **variables}, None, self._blocks)
            for piece in self._root(context):
                written.append(piece)
            environment.charge(sum(map(len, written)))
            return "".join(written), spans


@lru_cache(maxsize=16)
def compiled(source: str) -> CompiledTemplate:
    """Compile a template, once: several datasets use the same one, and `generate` renders a prompt at a time."""
    return CompiledTemplate(source)


class GenerationTag(Extension):
    """The tag `{% generation %}` … `{% endgeneration %}`, which notes where the text between them is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller: Callable[[], str]) -> str:
        text = caller()
        assert isinstance(self.environment, _Environment)
        self.environment.note(len(text))
        return text


EXTENSIONS = (GenerationTag, loopcontrols)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = CountingGenerator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        self.work = Work()
        self.charge = self.work.charge
        self._written: list[str] = []
        self._spans: list[Span] = []
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
        self.concat = self._concat  # type: ignore[method-assign, assignment]
        for name, function in self.filters.items():
            self.filters[name] = charged_filter(name, function, self.work)
        self.filters["tojson"] = charged_filter("tojson", _tojson, self.work)
        test: Any
        for name, test in self.tests.items():
            self.tests[name] = charged_test(name, test, self.work)
        # These write different text every time they are called, so the same data would be different tomorrow.
        del self.filters["random"], self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
        )

    def begin(self) -> tuple[list[str], list[Span]]:
        """Begin a rendering; return the lists that will hold its text and the spans in it."""
        self._written, self._spans = [], []
        return self._written, self._spans

    def note(self, length: int) -> None:
        """Note that the next `length` characters that are written are in `{% generation %}`."""
        start = sum(map(len, self._written))
        self._spans.append((start, start + length))

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in ATTRIBUTES_OF_DICTS:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
            if attribute in _SAFE_OF_DICTS:
                return getattr(obj, attribute)
        elif (kind is str and attribute in _SAFE_OF_TEXTS) or (kind is LoopContext and attribute in SAFE_OF_LOOPS):
            return getattr(obj, attribute)
        elif kind is _Namespace:
            value = object.__getattribute__(obj, "_Namespace__attrs").get(attribute)
            if type(value) in _WITHOUT_CODE:
                return value
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is tuple:
            self.work.weigh(argument)  # for its hash
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, charging for it."""
        work, owner = self.work, getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            kwargs.pop("_loop_vars", None)  # Jinja adds these for functions that take the context
            kwargs.pop("_block_vars", None)
            if args and isinstance(args[0], Iterator):
                args = ([*args[0]], *args[1:])  # to know how much there is to join
            work.before_method(obj.__name__, owner, args, kwargs)
            return work.result(obj(*args, **kwargs))
        if type(owner) is dict and obj.__name__ != "fromkeys":
            work.weigh(args[:1])  # a key, for its hash
        elif isinstance(owner, int | type) and args and isinstance(args[0], int):
            work.charge(abs(args[0]))  # to_bytes
        elif not isinstance(obj, Macro | BlockReference | LoopContext):
            work.weigh([owner, args, kwargs] if isinstance(owner, list | tuple) else [args, kwargs])
        work.enter()
        try:
            return work.result(super().call(context, obj, *args, **kwargs))
        finally:
            work.leave()

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is int and type(right) is int and operator in ("+", "-"):
            return self.work.result(left + right if operator == "+" else left - right)
        self.work.before_operator(operator, left, right)
        return self.work.result(super().call_binop(context, operator, left, right))

    def added(self, context: Context, terms: tuple[Any, ...]) -> Any:
        """Return the sum of these terms."""
        length = _length_of_texts(terms)
        if length is not None:
            self.charge(length)
            return "".join(terms)
        total, *rest = terms
        for term in rest:
            total = self.call_binop(context, "+", total, term)
        return total

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Do what Jinja's own method does, with formatters that charge."""
        if super().wrap_str_format(value) is None:
            return None
        text, many = value.__self__, value.__name__ == "format_map"
        escaped = isinstance(text, Markup)
        formatter = _EscapingFormatter(self, escape=text.escape) if escaped else _Formatter(self)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if many and (kwargs or len(args) != 1):
                raise TypeError("format_map() takes exactly one argument, and no keyword arguments")
            self.charge(len(text))
            given = ((), args[0]) if many else (args, kwargs)
            return type(text)(formatter.vformat(text, *given))

        return update_wrapper(wrapper, value)

    def charged(self, units: int) -> bool:
        self.charge(units)
        return True

    def compared(self, value: Any) -> Any:
        """Charge for a value that is compared with something or is the key of a dict, and return it."""
        if isinstance(value, str):
            if len(value) > 1000:
                self.charge(len(value) >> 4)
        elif isinstance(value, list | tuple | dict):
            self.work.weigh(value)
        return value

    def searched(self, value: Any) -> Any:
        """Charge for a value in which something is looked for, and return it."""
        return value if isinstance(value, dict) else self.compared(value)

    def joined(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Charge for parts that `~` joins, and return them."""
        length = _length_of_texts(parts)
        if length is not None:
            self.charge(length)
            return parts
        for part in parts:
            self.work.weigh(part, 6 if isinstance(part, Markup) else 1)
        return parts

    def sliced(self, value: Any) -> Any:
        return self.work.result(value)

    def printed(self, value: Any) -> str:
        if type(value) is str:
            return value  # counted when the pieces are joined
        self.work.weigh(value)
        return str(value)

    def _concat(self, pieces: Iterable[str]) -> str:
        known = list(pieces)
        self.charge(sum(map(len, known)))
        return "".join(known)


def _length_of_texts(parts: tuple[Any, ...]) -> int | None:
    """Return the length of all parts together; None if one is something other than plain text."""
    length = 0
    for part in parts:
        if type(part) is not str:
            return None
        length += len(part)
    return length


class _Charging(Formatter):
    """Formats with `str.format`, charging for what is written."""

    _env: Any  # our environment

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        field = super().get_field(field_name, args, kwargs)
        self._env.work.weigh(field[0], 10)  # !r and !a escape
        return field

    def format_field(self, value: Any, format_spec: str) -> Any:
        for digits in re.findall(r"\d+", format_spec):
            self._env.charge(whole(digits))
        return super().format_field(value, format_spec)


class _Formatter(_Charging, SandboxedFormatter):
    _env: Any


class _EscapingFormatter(_Charging, SandboxedEscapeFormatter):
    _env: Any


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


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes <, > and & for HTML.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
