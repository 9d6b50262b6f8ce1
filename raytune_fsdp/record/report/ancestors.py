"""What pages, cards and comparisons say of the runs from which a fork comes."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytune_fsdp.base.redaction import redact_shapes
from raytune_fsdp.base.untrusted import UnsoundError, printable, reason
from raytune_fsdp.record.lineage import ForkedFrom, known_lineage, links_of

logger = logging.getLogger(__name__)

_MOST_ROWS, _SHOWN = 100, 300


def rows_of_chain(run_dir: Path) -> list[tuple[str, str, str, str]]:
    """Return a row for each run from which a run comes, its parent first: name, step, what was changed, digest."""
    found = known_lineage(run_dir)
    links = [] if found is None else [*reversed(found.forks)][:_MOST_ROWS]
    return [(each.run, f"{each.step:,}", _changes(each), each.digest[:16]) for each in links]


def of_lineage(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a model card says of them, in Markdown. The recipe may be a stranger's."""
    if recipe.get("lineage") is None:
        return
    try:
        links = links_of(recipe["lineage"])
    except UnsoundError as error:
        logger.warning("the model card does not say from which runs its own comes: the recipe %s", reason(error))
        return
    yield from ("", "## Lineage", "")
    yield (
        "The run went on from a checkpoint of another one: from its weights, its optimizer's state and its place in "
        "the data. That run may have done so, too:"
    )
    yield from ("", "| run | after step | changed | digest of the checkpoint |", "|---|---|---|---|")
    for link in [*reversed(links)][:_MOST_ROWS]:
        yield f"| {_prose(link.run)} | {link.step:,} | {_prose(_changes(link))} | `{link.digest}` |"


def relation(a: Path, b: Path) -> list[str]:
    """Return how two runs are related by their lineages, in sentences; none if they are not."""
    chains = [() if (found := known_lineage(run)) is None else found.forks for run in (a, b)]
    for (child, chain), parent in zip(((b, chains[1]), (a, chains[0])), (a, b), strict=True):
        for number, link in enumerate(chain):
            if parent in (Path(link.path), child.parent / link.run):  # as it was, or beside it if both were moved
                return [_said(child.name, chain[number:])]
    common = 0
    while common < min(map(len, chains)) and chains[0][common].digest == chains[1][common].digest:
        common += 1
    if not common:
        return []
    link = chains[0][common - 1]
    same = f"{a.name} and {b.name} both come from {link.run}, of which they have the steps up to {link.step:,}."
    return [same, *(_said(run.name, chain[common - 1 :]) for run, chain in zip((a, b), chains, strict=True))]


def _said(child: str, chain: Sequence[ForkedFrom]) -> str:
    """Say by which forks a run comes from the first of a chain."""
    return f"{child} is a fork of {'; that one is a fork of '.join(each.words for each in reversed(chain))}."


def _changes(link: ForkedFrom) -> str:
    """Return what a fork changed, shortened and without secrets."""
    text = str(redact_shapes(link.changes)) or "nothing"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _prose(text: str) -> str:
    """Return a text as a cell of a table in Markdown that shows it and does nothing else."""
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", html.escape(printable(text), quote=False))
