"""What a run tells the region of a terminal that shows how far it is: lines of JSON among its other output.

The region belongs to the command that a person has started (cli/screen.py), and what it shows happens in other
processes: in ranks, under Ray on other nodes. Their lines reach the command's output anyway. So does this, in the same
order, as a line that begins with a character that text does not have.
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
"""Set where a region shows what is printed: to `colours` or `plain`."""
PLAIN_TERMS = ("dumb", "unknown", "")


@dataclass(frozen=True, slots=True)
class Looks:
    """What output may look like. Can be sent to other processes."""

    live: bool
    """A region shows how far the run is, below the lines."""
    colours: bool

    @classmethod
    def of(cls, stream: TextIO) -> Looks:
        found = getattr(stream, "looks", None)
        if isinstance(found, Looks):
            return found
        if stream is sys.stdout and VARIABLE in os.environ:
            return cls(live=True, colours=os.environ[VARIABLE] == "colours")
        return cls(live=False, colours=colourful(stream))


def colourful(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and whoever is at it wants them."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "") not in PLAIN_TERMS[:2]


def message(**fields: object) -> str:
    """What the region is to show from now on, as a line."""
    return MARK + json.dumps(fields, default=str)


def read_message(line: str) -> Mapping[str, Any] | None:
    """The fields of such a line; None if it is another one."""
    if not line.startswith(MARK) or len(line) > MIB:
        return None
    try:
        found = parse_json(line[len(MARK) :].encode(), constants=True)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def tell(**fields: object) -> None:
    """Tell the region of this process's output, if it has one."""
    if VARIABLE in os.environ:
        with suppress(OSError):  # it has gone, with its terminal or killed
            print(message(**fields), flush=True)
