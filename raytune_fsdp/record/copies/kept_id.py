"""The id that a receiver knows a run by, in a file of the run's directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from raytune_fsdp.base.untrusted import read_file, reason

logger = logging.getLogger(__name__)

_LIMIT = 1024


def kept_id(file: Path) -> str:
    """The id; empty if there is none. What cannot be one is set aside: the receiver would get nothing any more."""
    try:
        return read_file(file, limit=_LIMIT).decode().strip()
    except FileNotFoundError:
        return ""
    except ValueError as error:
        aside = file.with_name(f"{file.name}.damaged")
        os.replace(file, aside)
        logger.warning(
            "%s holds no id (%s): it is %s now, and the run gets a new one there", file, reason(error), aside.name
        )
        return ""
