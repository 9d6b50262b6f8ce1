"""Limit the work of a chat template: counted, never timed, so that no machine decides which rows exist.

A template is a stranger's program. `"x" * 10**9`, two nested loops over `range(100000)` or a list put twice into itself
forty times would take all memory or all day. So everything that a template does is charged, in advance where it may be
large: 12 units for every node of its code that is run, 1 for every character written to a text of any kind, 16 for
every entry of a list. 100 million units are a second or two of a processor, and at most 400 MB of text.

A long row may take more: each of its characters brings 128 units. That covers templates that gather the text or the
messages of a conversation in a variable and copy all of it with every message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeVar

from jinja2.utils import Namespace

T = TypeVar("T")

UNITS = 100_000_000
UNITS_PER_CHARACTER = 128
PER_NODE, PER_ENTRY = 12, 16

# The depth of macros in macros. Each takes six of Python's thousand frames, and how many a caller has left differs.
MAX_CALLS = 64
MAX_DEPTH = 200
"""The depth of lists in lists."""
MAX_BITS = 4096
"""The size of a whole number: with more bits, a single division may take an hour."""

_WIDTHS = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
_SEPARATES_LINES = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class WorkExceeded(Exception):
    """The template does more than a template may; the message says what."""


class Work:
    """What a template may still do in the current rendering. `begin` starts a rendering."""

    def __init__(self) -> None:
        self._left = UNITS
        self._calls = 0
        self._size: Callable[[], int] | None = None

    def begin(self, size: Callable[[], int]) -> None:
        """Begin a rendering. `size`: gives the row's number of characters; called only if it needs more than UNITS."""
        self._left, self._calls, self._size = UNITS, 0, size

    def charge(self, units: int) -> None:
        """Take these units from what is left. Raises WorkExceeded."""
        self._left -= units
        if self._left < 0:
            if self._size is not None:
                self._left += UNITS_PER_CHARACTER * self._size()
                self._size = None
            if self._left < 0:
                self._left = -1  # it stays used up, even if a template catches this
                raise WorkExceeded(
                    f"it does more than {UNITS // 10**6} million steps, written characters among them, and "
                    f"{UNITS_PER_CHARACTER} for each character of the row"
                )

    def enter(self) -> None:
        """Note that a macro or the like begins; `leave` ends it."""
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise WorkExceeded(f"its macros call each other more than {MAX_CALLS} deep")

    def leave(self) -> None:
        self._calls -= 1

    def weigh(self, value: Any, factor: int = 1) -> int:
        """Charge for all that a value contains, as often as a text made of it would; return the value's depth."""
        if type(value) is str:  # most are
            self.charge(factor * len(value))
            return 0
        level = [value]
        for depth in range(MAX_DEPTH):
            below: list[Any] = []
            for item in level:
                if isinstance(item, str | bytes):
                    self.charge(factor * len(item))
                elif isinstance(item, int):
                    self.check_number(item)
                else:
                    inside = _inside(item)
                    self.charge(factor * PER_ENTRY * (4 + len(inside)))
                    below += inside
            if not below:
                return depth
            level = below
        raise WorkExceeded(f"it makes lists more than {MAX_DEPTH} deep")

    def check_number(self, value: int) -> None:
        """Refuse whole numbers that are too large to calculate with."""
        if value.bit_length() > MAX_BITS:
            raise WorkExceeded(f"it makes whole numbers of more than {MAX_BITS} bits")

    def result(self, value: T) -> T:
        """Charge for what something returned, and return it. So what was not foreseen cannot grow a second time."""
        kind = type(value)
        if isinstance(value, str | bytes):
            self.charge(len(value))
        elif kind is bool:
            pass
        elif isinstance(value, int):
            self.check_number(value)
        elif isinstance(value, list | tuple | dict | set):
            self.charge(PER_ENTRY * len(value))
        return value

    def before_operator(self, operator: str, left: Any, right: Any) -> None:
        """Charge for `left operator right`."""
        if isinstance(left, int) and isinstance(right, int):
            self.check_number(left)
            self.check_number(right)
            if operator == "*" and left.bit_length() + right.bit_length() > MAX_BITS:
                raise WorkExceeded(f"it makes whole numbers of more than {MAX_BITS} bits")
            if operator == "**" and abs(left) > 1 and right * left.bit_length() > MAX_BITS:
                raise WorkExceeded(f"it makes whole numbers of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str | bytes):
            self.before_format(left, right)
        elif operator == "*":
            for each, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(each, str | bytes | list | tuple):
                    self.charge(_written(each) * max(0, times))
        elif isinstance(left, str | bytes | list | tuple) and isinstance(right, str | bytes | list | tuple):
            self.charge(_written(left) + _written(right))
        elif operator == "-":  # keys of a dict without those of another
            self.weigh([left, right])

    def before_format(self, text: str | bytes, values: Any) -> None:
        """Charge for `text % values`."""
        pattern = text.decode("latin-1") if isinstance(text, bytes) else text
        widths = [width for pair in _WIDTHS.findall(pattern) for width in pair if width]
        if "*" in widths:
            given = values if isinstance(values, tuple) else (values,)
            self.charge(sum(abs(value) for value in given if isinstance(value, int)))
        self.charge(len(text) + sum(whole(width) for width in widths if width != "*"))
        # Escapes of %r and %a have up to 10 characters; a dict may be written once for every % in the text.
        self.weigh(values, 10 * (pattern.count("%") if isinstance(values, dict) else 1))

    def before_method(self, name: str, text: str | bytes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Charge for a method of a text."""
        length = len(text)
        if name in _GROWING and len(args) < 2:
            return self.charge(
                4 * length + (_length(args[0]) * (length >> 3 if name == "rpartition" else 1) if args else 0)
            )
        first: Any = args[0] if args else None
        units = (length >> 4) + sum(len(arg) for arg in args if isinstance(arg, str | bytes))
        if name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int):
            units += length + max(0, first)
        elif name == "expandtabs":
            size = kwargs.get("tabsize", 8 if first is None else first)
            tabs = text.count("\t") if isinstance(text, str) else text.count(b"\t")
            units += length + tabs * (abs(size) if isinstance(size, int) else 0)
        elif name == "replace" and len(args) > 1 and isinstance(first, type(text)):
            units += length + text.count(first) * (_length(args[1]) + 1)  # type: ignore[arg-type]
        elif name in ("split", "rsplit"):
            separator = first if args else kwargs.get("sep")
            known = isinstance(separator, type(text)) and len(separator) > 0
            parts = text.count(separator) if known else length // 2  # type: ignore[arg-type]
            units += length + PER_ENTRY * (parts + 1)
        elif name == "splitlines":
            lines = sum(map(text.count, _SEPARATES_LINES)) if isinstance(text, str) else length
            units += length + PER_ENTRY * lines
        elif name == "join":
            self.weigh(first)
            units += length * (_length(first) if hasattr(first, "__len__") else 0)
        elif name == "translate" and isinstance(first, dict):
            units += length * max([1, *(len(value) for value in first.values() if isinstance(value, str))])
        elif name in ("maketrans", "fromhex"):
            self.weigh(list(args))
        if name in ("rfind", "rindex", "rsplit") and first is not None:
            units += length * _length(first) >> 3  # unlike find, these compare the whole of it everywhere
        self.charge(units)


_GROWING = {
    "capitalize", "casefold", "decode", "encode", "hex", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "rpartition", "rstrip", "strip", "swapcase", "title", "upper",
}  # fmt: skip
"""Methods of texts that return at most about three times the text."""


def size_of(value: Any) -> int:
    """Return the size of a row's content: its characters, and 64 for each value."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        total += 64
        if isinstance(item, str):
            total += len(item)
        else:
            stack += _inside(item)
    return total


def _inside(value: Any) -> Sequence[Any]:
    kind = type(value)
    if value is None or kind is float:  # these contain nothing; asking whether they are views of a dict takes a while
        return ()
    if kind is list or kind is tuple:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return [*value, *value.values()]
    if isinstance(value, Namespace):
        return [*value._Namespace__attrs.values()]  # type: ignore[attr-defined]
    if isinstance(value, list | tuple | set | frozenset | dict | KeysView | ValuesView | ItemsView):
        return [*value]
    return ()


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _written(value: str | bytes | list[Any] | tuple[Any, ...]) -> int:
    # Adding Markup to a text escapes the text: five characters for a quotation mark.
    return len(value) * (2 if isinstance(value, list | tuple) else 1 if type(value) in (str, bytes) else 6)


def whole(digits: str) -> int:
    """Return a width in a format as a number; a huge one where Python would refuse to read it."""
    return int(digits) if len(digits) < 10 else UNITS * 10**6
