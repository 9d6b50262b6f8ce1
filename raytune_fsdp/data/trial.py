"""Try what is a stranger's before it is used: users' functions, and chat templates.

Does a function give the same twice, and which modules does it need? Does what is known of a template find the turns of
the first rows as rendering each turn does?
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.mixture import FOURTH_ORDER
from raytune_fsdp.data.rows.formats import Formatter
from raytune_fsdp.data.rows.templates import ChatTemplate
from raytune_fsdp.data.sources.source import Source

logger = logging.getLogger(__name__)

_TRIED_ROWS, _TRIED_MESSAGES = 20, 24
"""How many rows a function is tried on (of each dataset) or a template (of all that have it), and messages of a row."""


def try_functions(formatters: Sequence[Formatter], sources: Sequence[Source], order: int) -> bool:
    """Refuse functions that do not give the same for a row in whichever process. Return whether they import modules.

    Only the user's own modules count; the functions then know them. A run of an older version of the order has no
    such modules in its identity, and goes on without them.
    """
    names = dict.fromkeys(each.function.own.name for each in formatters if each.function is not None)
    for name in names:
        every = [(f, f.function, source) for f, source in zip(formatters, sources, strict=True)]
        its = [
            (f, function, source) for f, function, source in every if function is not None and function.own.name == name
        ]
        tried = [source.rows(range(min(_TRIED_ROWS, len(source)))) for _, _, source in its]
        there = None
        if order >= FOURTH_ORDER:  # all its datasets in one process: its imports may take many seconds
            sound = [row for rows in tried for row in rows if not isinstance(row, RowError)]
            there = its[0][1].own.call_elsewhere(sound)
        results = iter(() if there is None else there.results)
        for (formatter, function, source), rows in zip(its, tried, strict=True):
            wheres, made = [source.where(index) for index in range(len(rows))], None
            if there is not None:
                made = [
                    row if isinstance(row, RowError) else function.read(next(results), where)
                    for row, where in zip(rows, wheres, strict=True)
                ]
                function.know(there.modules)
            formatter.check_function(rows, wheres, made)
    return any(each.function is not None and each.function.own.modules for each in formatters)


def try_templates(formatters: Sequence[Formatter], sources: Sequence[Source]) -> None:
    """Render the first rows both ways; where the ways differ, render each turn of all rows of that template.

    By the rules that the formatters have now: once these change, the templates have to be tried again.

    The outcome belongs to a run's identity, so only what a template does with conversations may decide it, not speed,
    storage or data.max_row_bytes. So a row that cannot be read or takes too much work is the same error here as later:
    were it left out, the next attempt might find it and come to another outcome. Bad rows are bad in every attempt.
    """
    by_template: dict[tuple[ChatTemplate, ...], list[tuple[Formatter, Source]]] = {}
    for formatter, source in zip(formatters, sources, strict=True):
        if formatter.finds_turns:
            by_template.setdefault(formatter.templates, []).append((formatter, source))
    for pairs in by_template.values():
        # As many rows for a template, however many datasets have it: there may be thousands.
        each = -(-_TRIED_ROWS // len(pairs))
        for formatter, _ in pairs:
            formatter.render_by_turn(False)
        alike = pairs[0][0].has_learned
        alike = alike and all(_renders_alike(formatter, source, each) for formatter, source in pairs[:_TRIED_ROWS])
        for formatter, _ in pairs:
            formatter.render_by_turn(not alike)


def _renders_alike(formatter: Formatter, source: Source, many: int) -> bool:
    for index, row in enumerate(source.rows(range(min(many, len(source))))):
        where = source.where(index)
        if not isinstance(row, RowError) and not formatter.renders_alike(row, where, _TRIED_MESSAGES):
            logger.info("%s: each turn is rendered by itself", where)
            return False
    return True
