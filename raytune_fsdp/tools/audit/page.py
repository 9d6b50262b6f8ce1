"""Write the outcome of an audit as a page for a third party."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from raytune_fsdp.base.errors import ConfigError, TransientError
from raytune_fsdp.base.untrusted import UnsoundError, open_regular, printable
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event, each_event
from raytune_fsdp.tools.audit.comparison import MACHINE, Audit

logger = logging.getLogger(__name__)


def report(found: Audit, name: str) -> Iterator[str]:
    """Yield the lines of the page, in Markdown, for a reader who knows nothing about the audit."""
    segment = found.segment
    yield f"# Audit of {name}, steps {segment.first + 1} to {segment.last}"
    yield ""
    if found.difference is None:
        measure = "to the bit" if not found.why_not_exact else "within the bounds of another order of additions"
        yield f"**Passed**: trained again, it is the same {measure}."
    else:
        yield f"**Not the same.** First difference: {found.difference}"
    yield ""
    begin = "the beginning" if segment.before is None else f"the checkpoint of step {segment.first}"
    data = "rows as its cache has them (--use-cache)" if found.use_cache else "data"
    yield f"The segment was trained again from {begin}, under the run's own config and on its {data}, and compared:"
    yield ""
    yield f"- {found.steps} steps: samples, tokens, targets and learning rates, which any number of ranks has alike"
    for key, off in found.largest.items():
        yield f"- {key}: largest relative difference {off:.2e}"
    if found.tensors:
        unequal = f"{found.unequal} of them differ in a bit or more" if found.unequal else "all of them the same bits"
        yield f"- {found.tensors} tensors of the checkpoint of step {segment.last}: {unequal}"
        if found.unequal:
            way = "largest number of their tensor" if segment.before is None else "way that their tensor has gone"
            yield f"- weights: off by {found.weights:.2e} of the {way}, at most"
            if segment.before is None:
                yield "- how far weights have gone since the beginning is not kept: begin with a checkpoint to see"
    elif segment.after is None:
        yield f"- the checkpoint of step {segment.last} has not been kept: weights are not compared"
    if found.why_not_exact:
        yield f"- not to the bit, because {found.why_not_exact}"
    if found.here:
        yield from ("", "| | ranks | device | threads | versions |", "|---|---|---|---|---|")
        for attempt in found.there:
            yield _machine_row(f"the run, attempt {attempt['attempt']}", attempt)
        yield _machine_row("the audit", found.here)


def check_record(place: RunDir) -> None:
    """Refuse an audit whose outcome could not be put on record, before it takes hours. Writes nothing."""
    try:
        if place.events.exists():
            os.close(open_regular(place.events, links=True, write=True))
        elif not place.path.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        elif not os.access(place.path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, UnsoundError) as error:
        why = f"cannot be written: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--record: {place.events} {why}; make it writable, or audit without --record") from None


def put_on_record(found: Audit, place: RunDir) -> None:
    """Add the outcome to the run's events, where its report finds it. It stays the outcome where that fails."""
    attempt = max((event["attempt"] for event in each_event(place.events)), default=0)
    fields = {
        "step": found.segment.last,
        "first": found.segment.first + 1,
        "ranks": found.here.get("world_size"),
        "difference": found.difference,
        "exact": found.difference is None and not found.why_not_exact,
        "cached": found.use_cache,
    }
    try:
        append_event(place.events, names.AUDITED, attempt=attempt, fields=fields)
    except TransientError as error:
        why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        logger.warning("the outcome is not on record: %s cannot be written (%s)", place.events, why)


def _machine_row(what: str, machine: Mapping[str, Any]) -> str:
    versions = found if isinstance(found := machine.get("versions"), dict) else {}
    named = ", ".join(f"{package} {version}" for package, version in versions.items()) or "not on record"
    shown = [machine[key] if machine.get(key) is not None else "not on record" for key in MACHINE[:3]]
    return f"| {what} | {_cell(shown[0])} | {_cell(shown[1])} | {_cell(shown[2])} | {_cell(named)} |"


def _cell(value: object) -> str:
    """Return a stranger's value as a cell of a table: it must not be able to forge a row or a column."""
    return printable(str(value)[:200]).replace("|", "\\|")
