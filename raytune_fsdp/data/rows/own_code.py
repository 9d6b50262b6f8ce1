"""Code of the user's that a config names as `module:function`: found, told apart by its source, called elsewhere.

A function never travels by itself: every process imports it, and compares the files of it and of the user's modules
that it needs with what they were when the run started.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp.base.errors import ConfigError, DataError, RowError, UserError, in_one_line
from raytune_fsdp.data.rows import elsewhere
from raytune_fsdp.data.sources.source import shorten

ROWS = "format.function"
"""The field of functions that turn rows into other rows."""

_SEEN: dict[str, tuple[object, str]] = {}
"""For each module its spec, which a reload replaces, and the hash of its file when it was first seen after that. If
the user has imported it, and changed it before a function in it was named here, this cannot show it."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The results of a function in a process of its own."""

    results: Sequence[tuple[str, Any]]
    """One for each row: `made` and a pickle, or `raised` and the exception's name and message."""
    modules: Mapping[str, str]
    """The user's own modules that it needs, and the present hashes of their files."""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A function by its name, and the code that it had when the run started. Can be pickled."""

    key: str
    """The field of the config that names it."""
    name: str
    """`module:function`"""
    code: str | None = None
    """The hash of its whole file: a change anywhere in it may change what the function returns. None: not known yet."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """The hashes of the user's own modules that it imports, by name."""

    @property
    def said(self) -> str:
        """How messages name it."""
        return f"{self.key}={self.name}"

    @property
    def found(self) -> OwnCode:
        """This with the hash of its file as it is now."""
        file = self._import()[1]
        return replace(self, code=self._unchanged(self.name.partition(":")[0], file))

    @property
    def identity(self) -> dict[str, str]:
        """The entries of a run's identity for its source."""
        assert self.code is not None
        modules = {f"{self.key}_modules.{name}": content for name, content in self.modules.items()}
        return {f"{self.key}_file": self.code, **modules}

    def load(self) -> Callable[..., Any]:
        """Import the function. Refuse other files than the run was started with."""
        function, file = self._import()
        module = self.name.partition(":")[0]
        wanted = {**self.modules, **({} if self.code is None else {module: self.code})}
        for each, content in wanted.items():
            place = file if each == module else _file_of(each)
            if place is None or _hash(place) != content:
                raise self._error(
                    f"{self.said}: {place or each} on {os.uname().nodename} is not the file that the run was started "
                    f"with; make it the same wherever {self._used}"
                )
            self._unchanged(each, place)
        return function

    def call_elsewhere(self, rows: Sequence[Mapping[str, Any]], by: str | None = None) -> Elsewhere:
        """Call it on rows in a process with another PYTHONHASHSEED, so that sets have another order there.

        `by`: the name of a function of ours that is given the user's and a row; None: it is called with the row.
        """
        module, _, function = self.name.partition(":")
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        request = {"path": sys.path, "module": module, "function": function, "rows": rows, "by": by}
        done = subprocess.run(  # -P: Python's `numbers`, which decimals need, is not the file beside this one
            [sys.executable, "-P", elsewhere.__file__], input=pickle.dumps(request), capture_output=True, check=False,
            env={**os.environ, "PYTHONHASHSEED": seed, elsewhere.IMPORTING: "1"},
        )  # fmt: skip
        if done.returncode != 0 or not done.stdout:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise self._error(
                f"{self.said}: it does not work in a fresh Python process, as the nodes of a run start "
                f"({shorten(last, limit=300)}); make its module import all that it needs"
            )
        answer = pickle.loads(done.stdout)
        nowhere = [each for each, file in answer["modules"].items() if file is None]
        if nowhere:
            raise self._error(
                f"{self.said}: it imports {nowhere[0]}, whose code is in no file, so that nobody could tell "
                "when it has changed; put the code into a file"
            )
        hashes = {each: self._unchanged(each, file) for each, file in answer["modules"].items()}
        return Elsewhere(answer["results"], hashes)

    def _unchanged(self, module: str, file: str) -> str:
        """Return the hash of a module's file. Refuse one that is no longer what this process has imported."""
        content, imported = _hash(file), sys.modules.get(module)
        if imported is not None:
            spec = getattr(imported, "__spec__", imported)  # a reload gives it another one
            if module not in _SEEN or _SEEN[module][0] is not spec:
                _SEEN[module] = spec, content
            elif _SEEN[module][1] != content:
                raise self._error(
                    f"{self.said}: {file} has changed since this process imported it, and Python keeps what it has "
                    "imported: restart Python (in a notebook, the kernel)"
                )
        return content

    @property
    def _used(self) -> str:
        return "data is read" if self.key == ROWS else "ranks run"

    def _error(self, message: str) -> UserError:
        return DataError(message) if self.key == ROWS else ConfigError(message)

    def _import(self) -> tuple[Callable[..., Any], str]:
        """Return the function and the file of its module."""
        module, _, function = self.name.partition(":")
        try:
            imported = _import(module)
        except ConfigError as error:  # it calls finetune
            raise self._error(f"{self.said}: {in_one_line(error)}") from error
        except Exception as error:  # the user's code runs here
            raise self._error(
                f"{self.said}: {module} cannot be imported on {os.uname().nodename} ({in_one_line(error)}); "
                f"it was looked for in {', '.join(path or os.getcwd() for path in sys.path)}; put the file into one of "
                f"these, or its directory into PYTHONPATH, wherever {self._used}"
            ) from error
        found, place = getattr(imported, function, None), getattr(imported, "__file__", None)
        if not callable(found) or place is None:
            raise self._error(f"{self.said}: {place or module} has no function {function}; correct the name")
        return found, place


class RowFunction:
    """The user's function `module:function` that turns rows into other rows (`format: {type: python}`), imported.

    `code`, `modules`: the hashes that its file and its modules had when the run started.
    """

    def __init__(self, name: str, code: str | None = None, modules: Mapping[str, str] | None = None) -> None:
        own = OwnCode(ROWS, name, code, modules or {})
        self._function: Callable[[dict[str, Any]], Any] = own.load()
        self.own = own.found

    def know(self, modules: Mapping[str, str]) -> None:
        """Keep the hashes of the modules that it imports, as they are now."""
        self.own = replace(self.own, modules=modules)

    def __call__(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return what the function makes of a row. Raises RowError."""
        made, error = elsewhere.try_call(self._function, row)
        if error is not None:
            raise self._raised(type(error).__name__, str(error), where) from error
        return self._checked(made, where)

    def read(self, result: tuple[str, Any], where: str) -> dict[str, Any] | RowError:
        """Return what the function has made of a row in another process."""
        kind, value = result
        try:
            if kind == "raised":
                name, message = value
                raise self._raised(name, message, where)
            return self._checked(pickle.loads(value), where)
        except RowError as error:
            return error

    def _raised(self, kind: str, message: str, where: str) -> RowError:
        return RowError(
            f"{where}: {self.own.name} raised {kind}: {shorten(message)}; correct it or the row",
            "function",
        )

    def _checked(self, made: Any, where: str) -> dict[str, Any]:
        if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
            raise RowError(
                f"{where}: {self.own.name} returned {shorten(made)}, not a dict with the columns of format.then",
                "function",
            )
        return made


def _file_of(module: str) -> str | None:
    """Return the file of a module, which the function may import only when it is called."""
    try:
        importlib.import_module(module)
    except Exception:  # the user's code runs here, and it may have changed
        return None
    return elsewhere.file_of(module)


def _hash(file: str) -> str:
    return xxhash.xxh3_128_hexdigest(Path(file).read_bytes())


def _import(module: str) -> Any:
    # Add the directory that the command runs in, as `python -m` does; a console script does not.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    token = elsewhere.importing.set(True)
    try:
        return importlib.import_module(module)
    finally:
        elsewhere.importing.reset(token)
