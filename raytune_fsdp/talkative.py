"""Libraries that print while they are imported, which in a process of ours may be before any function of it is called:
what a process gets to work on names their classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

HUSHED = "RAYTUNE_FSDP_HUSHED"
"""Set for processes that have to be quiet from their beginning."""

_LOGGERS = ("torchao", "torch.utils._pytree")
"""transformers imports torchao wherever it is installed. That says which of its kernels this machine cannot load, and
has torch say what later versions of it will not accept."""


def hush() -> Mapping[str, int]:
    """Let them say only what went wrong. Returns their levels."""
    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    return before


def hush_if_told() -> None:
    if os.environ.get(HUSHED):
        hush()
