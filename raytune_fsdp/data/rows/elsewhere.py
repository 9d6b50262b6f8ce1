"""Call a function of the user's in a process of its own, and list the modules that it needs.

`own_code` starts this file by its path, under another PYTHONHASHSEED. The file imports only the standard library, so
every module that `sys.modules` gains comes from importing the function or from calling it.
"""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib.machinery import NamespaceLoader
from pathlib import Path
from typing import Any

IMPORTING = "RAYTUNE_FSDP_IMPORTING"
"""The variable that tells the process of this file that it imports code of the user's."""
importing: ContextVar[bool] = ContextVar("importing", default=False)
"""Whether this thread, of any other process, does so right now."""

_INSTALLED = {"site-packages", "dist-packages"}
_NOT_USERS = {"raytune_fsdp", "__mp_main__", "_remote_module_non_scriptable"}
"""This package; what `multiprocessing` calls this file when it is imported; and a module that torch writes among
temporary files."""


def try_call(function: Callable[[dict[str, Any]], Any], row: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """Return what a function makes of a row, or what it raises. The row stays as it is."""
    try:
        return function(copy.deepcopy(dict(row))), None
    except Exception as error:
        return None, error


def modules_of_users(names: set[str]) -> dict[str, str | None]:
    """Return the file of each of these modules that the user wrote; None if its code is in no file.

    Modules of the standard library, of installed packages and of this package are left out.
    """
    paths = sysconfig.get_paths()
    known = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places = [os.path.realpath(each) for each in (*known, *site.getsitepackages(), site.getusersitepackages())]
    found: dict[str, str | None] = {}
    for name in sorted(names):
        top = name.partition(".")[0]
        if top in _NOT_USERS or _is_installed(file_of(top), places):
            continue
        file = file_of(name)
        if file is None:
            if _is_imported_from_nowhere(name):
                found[name] = None
        elif not _is_installed(file, places):
            found[name] = file
    return found


def _is_installed(file: str | None, places: list[str]) -> bool:
    if file is None:
        return False
    real = os.path.realpath(file)
    return bool(_INSTALLED & set(Path(real).parts)) or any(real.startswith(f"{place}{os.sep}") for place in places)


def file_of(name: str) -> str | None:
    """Return the file with the code of a module; for a module in an archive, the archive."""
    place = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(place, str):
        return None
    path = Path(place).absolute()
    return next((str(each) for each in (path, *path.parents) if each.is_file()), None)


def _is_imported_from_nowhere(name: str) -> bool:
    """Return whether an importer has made the module from something that is no file.

    Excluded are a package without code (a directory), modules built into Python, and modules that other code makes:
    that code has a file, or is in a parent that has one.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or isinstance(spec.loader, NamespaceLoader | None) or spec.origin in ("built-in", "frozen"):
        return False
    parts = name.split(".")
    return not any(file_of(".".join(parts[:many])) for many in range(1, len(parts)))


def _sent(made: Any, error: Exception | None) -> tuple[str, Any]:
    if error is not None:
        return "raised", (type(error).__name__, str(error))
    try:
        return "made", pickle.dumps(made)
    except Exception:  # a column holds something that cannot be sent, so no token comes from it
        columns = made.items() if isinstance(made, dict) else ()
        return "made", pickle.dumps({name: value for name, value in columns if _can_be_sent(value)})


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _named(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    request = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the function may print
    sys.path[:] = request["path"]
    call = _named(request["by"]) if request["by"] else try_call
    before = set(sys.modules)
    function = _named(f"{request['module']}:{request['function']}")
    # From the last row to the first, so that state which a function keeps between calls shows, too.
    results = [_sent(*call(function, row)) for row in reversed(request["rows"])]
    modules = modules_of_users(set(sys.modules) - before - {request["module"]})
    with answer:
        pickle.dump({"results": results[::-1], "modules": modules}, answer)
    os._exit(0)  # without waiting for threads that the function has started


if __name__ == "__main__":
    main()
