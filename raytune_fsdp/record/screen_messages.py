"""Messages of a run to the region of a terminal that shows its progress: lines of JSON among the run's other output.

The region belongs to the command that a person has started (cli/screen.py), and what it shows happens in other
processes: in ranks, under Ray on other nodes. Their lines reach the command's output anyway. So do these messages, in
the same order, each as a line that begins with a character that no text has.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from raytune_fsdp.base.untrusted import MIB, parse_json

MARK = "\x1e"
VARIABLE = "RAYTUNE_FSDP_LIVE"
"""An environment variable that is set if a region shows what is printed, to `colours` or `plain`."""
PLAIN_TERMS = ("dumb", "unknown", "")


@dataclass(frozen=True, slots=True)
class Looks:
    """How output may look. Can be sent to other processes."""

    live: bool
    """A region below the lines shows the run's progress."""
    colours: bool

    @classmethod
    def of(cls, stream: TextIO) -> Looks:
        found = getattr(stream, "looks", None)
        if isinstance(found, Looks):
            return found
        if stream is sys.stdout and VARIABLE in os.environ:
            return cls(live=True, colours=os.environ[VARIABLE] == "colours")
        shows_colours = stream.isatty() and os.environ.get("TERM", "") not in PLAIN_TERMS[:2]
        return cls(live=False, colours=shows_colours and "NO_COLOR" not in os.environ)


def message(**fields: object) -> str:
    """Return the line that makes the region show these fields from now on."""
    return MARK + json.dumps(fields, default=str)


def read_message(line: str) -> Mapping[str, Any] | None:
    """Return the fields of a line that `message` made; None if it is any other line."""
    if not line.startswith(MARK) or len(line) > MIB:
        return None
    try:
        found = parse_json(line[len(MARK) :].encode(), constants=True)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def tell(**fields: object) -> None:
    """Send a message to the region that shows this process's output, if there is one."""
    if VARIABLE in os.environ:
        with suppress(OSError):  # the region is gone: its terminal was closed, or it was killed
            print(message(**fields), flush=True)
