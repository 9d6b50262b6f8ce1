"""Hush libraries that print while they are imported.

In one of our processes that may happen before any function is called, as the pickled input names their classes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

HUSHED = "RAYTUNE_FSDP_HUSHED"
"""Environment variable of processes that must be quiet from their beginning."""

VERBOSE = "RAYTUNE_FSDP_VERBOSE"
"""Environment variable that `--verbose` sets, for this process and those that it starts."""

_LOGGERS = ("torchao", "torch.utils._pytree")
"""transformers imports torchao wherever it is installed. torchao reports which of its kernels this machine cannot load,
and makes torch warn of what later versions will not accept."""


def is_verbose() -> bool:
    return os.environ.get(VERBOSE, "") not in ("", "0")


def hush() -> Mapping[str, int]:
    """Let these libraries report errors only. Return their earlier levels."""
    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    if not is_verbose():
        set_levels({name: max(level, logging.ERROR) for name, level in before.items()})
    return before


def set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def speak() -> None:
    """Let these libraries say everything again."""
    set_levels(dict.fromkeys(_LOGGERS, logging.NOTSET))


def hush_if_asked() -> None:
    if os.environ.get(HUSHED):
        hush()
