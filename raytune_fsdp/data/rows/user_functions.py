"""Functions of the user that turn rows into other rows: `format: {type: python}`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.rows.elsewhere import try_call
from raytune_fsdp.data.rows.own_code import ROWS, OwnCode
from raytune_fsdp.data.sources.source import shorten


class RowFunction:
    """The user's function `module:function`, imported.

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
