"""Functions that a program gives to `finetune`, as the names under which every process of the run can import them.

A function itself never travels: the config on record names it, so the command goes on without the program's object, and
its source belongs to the run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ConfigError

_FIELDS = ("train.loss", "model.network", "data.train.*.format.function", "data.eval.*.format.function")
"""Where a function may stand for its name."""


def with_names(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections with `module:function` in place of functions. Names of fields may be in any case."""
    made: Any = sections
    for field in _FIELDS:
        made = _with_name(made, field.split("."))
    found: Mapping[str, Any] = made
    return found


def _with_name(value: Any, below: Sequence[str], above: Sequence[str] = ()) -> Any:
    """Return a part of the sections with a name in place of a function at this place below it."""
    if not below:
        return _name_of(value, ".".join(above)) if callable(value) else value
    name, *rest = below
    if name == "*" and isinstance(value, list | tuple):
        return [_with_name(each, rest, (*above, str(number))) for number, each in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _with_name(each, rest, (*above, name)) if str(key).lower() == name else each for key, each in value.items()
    }


def _name_of(function: Any, field: str) -> str:
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        raise ConfigError(f"{field}: {function!r} is no function with a name of its own; write one with def, in a file")
    imported = sys.modules.get(module)
    if not name.isidentifier() or getattr(imported, name, None) is not function:
        raise ConfigError(
            f"{field}: {module}.{name} cannot be imported by ranks, which are other processes: it must be at the top "
            "of its module, under its own name (no lambda, no function in another one, no method)"
        )
    if getattr(imported, "__file__", None) is None:
        raise ConfigError(
            f"{field}: the code of {name} is in no file, so ranks could not import it, and nobody could tell when it "
            "has changed: write it to a file (in a notebook, a cell that begins with %%writefile my_code.py) and "
            "import it from there"
        )
    return f"{_main(field, name) if module == '__main__' else module}:{name}"


def _main(field: str, name: str) -> str:
    """Return the name under which other processes can import the script that runs."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m
        return str(spec.name)
    file = Path(str(main.__file__)).absolute()
    if not file.stem.isidentifier() or str(file.parent) not in {str(Path(each).absolute()) for each in sys.path}:
        raise ConfigError(
            f"{field}: {name} is in {file}, which cannot be imported: put it into a file whose name is that of a "
            "module, such as my_code.py, and import it from there"
        )
    return file.stem
