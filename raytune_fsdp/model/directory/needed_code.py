"""Code of a user's own that a config.json needs: the function that builds its network (`model.network`).

It does not lie in the model's directory, and nothing that lies there has it imported: only the config of a run does, or
a user who has read it and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config.rules import function_name

ENTRY = "network_function"
"""The name of the function, in a config.json."""


def function_in(values: Mapping[str, Any]) -> str | None:
    """Return the name of the function that a config.json needs; None: none."""
    found = values.get(ENTRY)
    return found if isinstance(found, str) else None


def check_trusted(values: Mapping[str, Any], where: object, *, trusted: bool) -> str | None:
    """Return the name of the function that a config.json needs. Refuse it for a user who has not read the code."""
    name = function_in(values)
    if name is not None and not trusted:
        raise ModelError(
            f"{where} needs a network of its maker's own, which the function {shown(name)} builds: look at its code, "
            "then add --trust-remote-code (in a run: set model.network)"
        )
    if name is not None:
        try:
            function_name(name)
        except ValueError as error:
            raise ModelError(
                f"{where} needs a network of its maker's own, and its {ENTRY}={shown(name)} is no module:function, so "
                "nothing is imported: download it again, or correct it"
            ) from error
    return name


def check_there(name: str, where: object) -> None:
    """Refuse a network whose code is missing here. Nothing of it runs."""
    module = name.partition(":")[0]
    try:
        there = find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        raise ModelError(
            f"{where} needs a network of its maker's own, which the function {shown(name)} builds, and there is no "
            f"module {shown(module)} here: put its directory into PYTHONPATH"
        )
