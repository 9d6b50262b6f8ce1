"""Jinja's filters and tests, which charge for what they do (see `work`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context

from raytune_fsdp.data.rows.work import PER_ENTRY, Work, WorkExceeded

# These look at one value, or at one entry of it.
_FREE = frozenset(("abs", "attr", "count", "d", "default", "first", "float", "last", "length"))
# These go through the entries of a list, most of them one at a time and only as far as they are asked.
_ITERATED = frozenset(
    ("batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice")
)
# These may take time with the square of a text's length: `striptags` copies the whole text for each comment in it.
_SQUARED = frozenset(("striptags", "sum", "urlize", "wordwrap", "xmlattr"))
# How many characters one becomes (`&quot;`, `\u0000`, `%F0%9F%98%80`), or how much longer than copying it takes.
_FACTORS = {
    "dictsort": 8, "e": 6, "escape": 6, "forceescape": 6, "groupby": 8, "max": 2, "min": 2, "pprint": 50, "sort": 8,
    "title": 8, "tojson": 6, "unique": 4, "urlencode": 12, "wordcount": 16, "xmlattr": 12,
}  # fmt: skip

_FREE_TESTS = {
    "boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter", "float", "integer",
    "iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined",
}  # fmt: skip


def charged_filter(name: str, function: Callable[..., Any], work: Work) -> Callable[..., Any]:
    """Return the filter, charging its costs before it starts, and for its result."""
    if name in _FREE:
        return function
    passed = _passed(function)
    factor = _FACTORS.get(name, 1)
    alone = name not in _ITERATED | _SQUARED | {"center", "indent", "round"}

    # pass_context also keeps Jinja from calling it with constants while it compiles.
    @pass_context
    def charged(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        if alone and type(value) is str and not args and not kwargs:
            work.charge(factor * len(value))
        else:
            if isinstance(value, Iterator) and name not in _ITERATED:
                value = [*value]
            _charge(work, name, factor, value, args, kwargs)
        return work.result(function(*passed(context), value, *args, **kwargs))

    return charged


def charged_test(name: str, function: Callable[..., Any], work: Work) -> Callable[..., Any]:
    """Return the test, charging for what it compares."""
    if name in _FREE_TESTS:
        return function
    passed = _passed(function)

    @pass_context
    def charged(context: Context, value: Any, /, *args: Any) -> Any:
        work.weigh([value, *args])
        return function(*passed(context), value, *args)

    return charged


def _charge(work: Work, name: str, factor: int, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [*args, *kwargs.values()]
    numbers = sum(abs(each) for each in given if isinstance(each, int))
    separators = [text for each in given if isinstance(each, list | tuple) for text in each]  # of tojson
    texts = sum(len(each) for each in [*given, *separators] if isinstance(each, str))
    if name in _ITERATED:
        work.charge(PER_ENTRY * (numbers + (len(value) if hasattr(value, "__len__") else 0)))
        return
    if name == "round" and numbers > 1000:
        raise WorkExceeded("it rounds to more than 1000 digits")
    if name == "format" and isinstance(value, str):
        work.before_format(value, kwargs or tuple(args))
        return
    depth = work.weigh([value, *given], factor)
    length = len(value) if hasattr(value, "__len__") else 0
    if name in _SQUARED:
        work.charge(length * (texts + numbers) + length * length // 1000)
    elif name == "center":
        work.charge(numbers or 80)
    elif name in ("indent", "join"):
        lines = value.count("\n") + 2 if isinstance(value, str) and name == "indent" else length
        work.charge(lines * (texts + numbers + 4))
    elif name == "replace" and isinstance(value, str) and len(given) > 1:
        work.charge(value.count(str(given[0])) * (len(str(given[1])) + 1))
    elif name == "tojson" and (texts or numbers):  # an indent: at most this wide in front of every entry
        work.weigh(value, (depth + 1) * (texts + numbers))


def _passed(function: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """Return a function of the context that gives what Jinja passes in front of a function's arguments."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    if wanted == "context":
        return lambda context: (context,)
    if wanted == "eval_context":
        return lambda context: (context.eval_ctx,)
    if wanted == "environment":
        return lambda context: (context.environment,)
    return lambda context: ()
