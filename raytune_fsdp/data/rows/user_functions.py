"""Functions of the user that turn rows into other rows: `format: {type: python}`."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp.base.errors import DataError, RowError, in_one_line
from raytune_fsdp.data.rows import elsewhere
from raytune_fsdp.data.rows.elsewhere import try_call
from raytune_fsdp.data.sources.source import shorten


class RowFunction:
    """The user's function `module:function`, imported.

    `code`, `modules`: the hashes that its file and its modules had when the run started.
    """

    def __init__(self, name: str, code: str | None = None, modules: Mapping[str, str] | None = None) -> None:
        self.name = name
        module, _, function = name.partition(":")
        try:
            imported = _import(module)
        except Exception as error:  # the user's code runs here
            raise DataError(
                f"format.function={name}: {module} cannot be imported on {os.uname().nodename} ({in_one_line(error)}); "
                f"it was looked for in {', '.join(path or os.getcwd() for path in sys.path)}; put the file into one of "
                "these, or its directory into PYTHONPATH, wherever data is read"
            ) from error
        found, place = getattr(imported, function, None), getattr(imported, "__file__", None)
        if not callable(found) or place is None:
            raise DataError(f"format.function={name}: {place or module} has no function {function}; correct the name")
        self._function: Callable[[dict[str, Any]], Any] = found
        self.code = _hash(place)
        """The hash of the whole file: a change anywhere in it may change what the function returns."""
        self.modules: Mapping[str, str] = modules or {}
        """The hashes of the user's own modules that it imports, by name."""
        wanted = {**self.modules, **({} if code is None else {module: code})}
        for each, content in wanted.items():
            file = place if each == module else _file_of(each)
            if file is None or _hash(file) != content:
                raise DataError(
                    f"format.function={name}: {file or each} on {os.uname().nodename} is not the file that the run was "
                    "started with; make it the same wherever data is read"
                )

    def __call__(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return what the function makes of a row. Raises RowError."""
        made, error = try_call(self._function, row)
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
            f"{where}: {self.name} raised {kind}: {shorten(message)}; correct it or the row",
            "function",
        )

    def _checked(self, made: Any, where: str) -> dict[str, Any]:
        if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
            raise RowError(
                f"{where}: {self.name} returned {shorten(made)}, not a dict with the columns of format.then",
                "function",
            )
        return made


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The results of a function in a process of its own."""

    results: Sequence[tuple[str, Any]]
    """One for each row; `RowFunction.read` reads it."""
    modules: Mapping[str, str]
    """The user's own modules that it needs, and the present hashes of their files."""


def call_elsewhere(name: str, rows: Sequence[Mapping[str, Any]]) -> Elsewhere:
    """Call a function on rows in a process with another PYTHONHASHSEED, so that sets have another order there."""
    module, _, function = name.partition(":")
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    request = {"path": sys.path, "module": module, "function": function, "rows": rows}
    done = subprocess.run(
        [sys.executable, elsewhere.__file__], input=pickle.dumps(request), capture_output=True, check=False,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )  # fmt: skip
    if done.returncode != 0 or not done.stdout:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(
            f"format.function={name}: it does not work in a fresh Python process, as the nodes of a run start "
            f"({shorten(last)}); make its module import all that it needs"
        )
    answer = pickle.loads(done.stdout)
    nowhere = [each for each, file in answer["modules"].items() if file is None]
    if nowhere:
        raise DataError(
            f"format.function={name}: it imports {nowhere[0]}, whose code is in no file, so that nobody could tell "
            "when it has changed; put the code into a file"
        )
    return Elsewhere(answer["results"], {each: _hash(file) for each, file in answer["modules"].items()})


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
    return importlib.import_module(module)
