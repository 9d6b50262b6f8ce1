"""Try users' functions before they are used: does each give the same twice, and which modules does it need?"""

from __future__ import annotations

from collections.abc import Sequence

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.mixture import FOURTH_ORDER
from raytune_fsdp.data.rows.formats import Formatter
from raytune_fsdp.data.rows.user_functions import call_elsewhere
from raytune_fsdp.data.sources.source import Source

_TRIED_ROWS = 20
"""How many rows of each dataset its function is tried on."""


def try_functions(formatters: Sequence[Formatter], sources: Sequence[Source], order: int) -> bool:
    """Refuse functions that do not give the same for a row in whichever process. Return whether they import modules.

    Only the user's own modules count; the functions then know them. A run of an older version of the order has no
    such modules in its identity, and goes on without them.
    """
    names = dict.fromkeys(each.function.name for each in formatters if each.function is not None)
    for name in names:
        every = zip(formatters, sources, strict=True)
        pairs = [(f, source) for f, source in every if f.function is not None and f.function.name == name]
        tried = [source.rows(range(min(_TRIED_ROWS, len(source)))) for _, source in pairs]
        there = None
        if order >= FOURTH_ORDER:  # all its datasets in one process: its imports may take many seconds
            there = call_elsewhere(name, [row for rows in tried for row in rows if not isinstance(row, RowError)])
        results = iter(() if there is None else there.results)
        for (formatter, source), rows in zip(pairs, tried, strict=True):
            assert formatter.function is not None
            wheres, made = [source.where(index) for index in range(len(rows))], None
            if there is not None:
                made = [
                    row if isinstance(row, RowError) else formatter.function.read(next(results), where)
                    for row, where in zip(rows, wheres, strict=True)
                ]
                formatter.function.modules = there.modules
            formatter.check_function(rows, wheres, made)
    return any(each.function is not None and each.function.modules for each in formatters)
