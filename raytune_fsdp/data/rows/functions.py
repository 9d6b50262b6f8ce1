"""Functions of the user's own that turn rows into other rows: `format: {type: python}`."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp.data.sources import shorten
from raytune_fsdp.errors import DataError, RowError, in_one_line


class RowFunction:
    """`module:function`, imported. `code`: the hash of the module's file; another one is refused."""

    def __init__(self, name: str, code: str | None = None) -> None:
        self._name = name
        module, _, function = name.partition(":")
        try:
            imported = _import(module)
        except Exception as error:  # it is the user's code that runs here
            raise DataError(
                f"format.function={name}: {module} cannot be imported on {os.uname().nodename} ({in_one_line(error)}); "
                f"it was looked for in {', '.join(path or os.getcwd() for path in sys.path)}; put the file into one of "
                "these, or its directory into PYTHONPATH, wherever data is read"
            ) from error
        found, place = getattr(imported, function, None), getattr(imported, "__file__", None)
        if not callable(found) or place is None:
            raise DataError(f"format.function={name}: {place or module} has no function {function}; correct the name")
        self._function: Callable[[dict[str, Any]], Any] = found
        file = Path(place)
        self.code = xxhash.xxh3_128_hexdigest(file.read_bytes())
        """The hash of the whole file: a change anywhere in it may change what the function returns."""
        if code is not None and code != self.code:
            raise DataError(
                f"format.function={name}: {file} on {os.uname().nodename} is not the file that the run was started "
                "with; make it the same wherever data is read"
            )

    def __call__(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What the function makes of a row. Raises RowError."""
        try:
            made = self._function(copy.deepcopy(dict(row)))
        except Exception as error:
            raise RowError(
                f"{where}: {self._name} raised {type(error).__name__}: {shorten(str(error))}; correct it or the row",
                "function",
            ) from error
        if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
            raise RowError(
                f"{where}: {self._name} returned {shorten(made)}, not a dict with the columns of format.then",
                "function",
            )
        return made


def _import(module: str) -> Any:
    # The directory that the command runs in, as `python -m` does it; a console script does not.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module)
