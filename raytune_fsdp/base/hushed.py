"""Libraries that print while they are imported, which in a process of ours may be before any function of it is called:
what a process gets to work on names their classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

HUSHED = "RAYTUNE_FSDP_HUSHED"
"""Set for processes that have to be quiet from their beginning."""

VERBOSE = "RAYTUNE_FSDP_VERBOSE"
"""Set for this process and those that it starts by `--verbose`."""

_LOGGERS = ("torchao", "torch.utils._pytree")
"""transformers imports torchao wherever it is installed. That says which of its kernels this machine cannot load, and
has torch say what later versions of it will not accept."""


def is_verbose() -> bool:
    return os.environ.get(VERBOSE, "") not in ("", "0")


def hush() -> Mapping[str, int]:
    """Let them say only what went wrong. Returns their levels."""
    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    if not is_verbose():
        set_levels({name: max(level, logging.ERROR) for name, level in before.items()})
    return before


def set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def speak() -> None:
    """Let them say everything again."""
    set_levels(dict.fromkeys(_LOGGERS, logging.NOTSET))


def hush_if_told() -> None:
    if os.environ.get(HUSHED):
        hush()
