"""The sweeps of a storage as the page of its runs shows them, from their logs alone, which may be a stranger's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.plan.run_dir import is_run
from raytune_fsdp.record.report.runs_page import ShownField, ShownSweep, ShownTrial
from raytune_fsdp.tune.log import LOG_FILE, Entry, SweepBegun, read_log, trials_in
from raytune_fsdp.tune.place import SWEEP_FILE
from raytune_fsdp.tune.space import run_name_in
from raytune_fsdp.tune.spec import MOST_TRIALS
from raytune_fsdp.tune.table import Standing, best_of, leaderboard, standings

_MOST_SWEEPS = 20


def sweeps_in(storage: Path) -> tuple[list[ShownSweep], int]:
    """Return the sweeps of a storage directory whose logs have changed last, the newest first, and how many older ones
    there are."""
    places: list[tuple[float, Path]] = []
    for path in storage.absolute().iterdir():
        with suppress(OSError):  # another user's, or one that has only just begun
            if (path / SWEEP_FILE).exists() and not is_run(path):
                places.append((-(path / LOG_FILE).lstat().st_mtime, path))
    places.sort()
    found = (shown_sweep(path) for _, path in places[:_MOST_SWEEPS])
    return [sweep for sweep in found if sweep is not None], max(0, len(places) - _MOST_SWEEPS)


def shown_sweep(path: Path) -> ShownSweep | None:
    """Return what a sweep's directory says of it: its trials, or why its log cannot be read. None: it has no trial."""
    try:
        log = read_log(path / LOG_FILE)
        if (many := len(trials_in(log))) > MOST_TRIALS:
            raise ResumeError(f"{path / LOG_FILE}: has {many:,} trials, and a sweep has {MOST_TRIALS:,} at most")
    except ResumeError as error:
        return ShownSweep(name=path.name, wrong=str(error))
    begun = next((entry for entry in log if isinstance(entry, SweepBegun)), None)
    return None if begun is None or not many else _shown(path.name, log, begun)


def _shown(name: str, log: Sequence[Entry], begun: SweepBegun) -> ShownSweep:
    board, metric = leaderboard(log), begun.decides.get("metric")
    best, place = best_of(board), {row.trial.variant: number for number, row in enumerate(board)}
    rows = sorted(standings(log), key=lambda row: (place[row.trial.variant], row.trial.number))
    said = ""
    if best is not None:
        mean = f", the mean over {best.seeds} seeds" if best.seeds > 1 else ""
        said = f"{run_name_in(name, best.trial.variant, generation=best.generation)}, {best.value:.5g}{mean}"
    return ShownSweep(
        name=name,
        metric=metric if isinstance(metric, str) else "mean loss",
        highest=begun.highest,
        fields=list(_fields(begun.decides.get("space"), rows)),
        trials=[
            ShownTrial(
                run=run_name_in(name, row.trial.variant, row.trial.seed, row.generation),
                changes=row.changes,
                value=row.value if row.value is not None and math.isfinite(row.value) else None,
                step=row.step,
                state=row.state,
                best=best is not None and row.trial.variant == best.trial.variant,
            )
            for row in rows
        ],
        best=said,
    )


def _fields(space: object, rows: Sequence[Standing]) -> Iterator[ShownField]:
    """Yield the fields that trials change, in the order of the space."""
    ways: Mapping[str, Any] = space if isinstance(space, dict) else {}
    changed = dict.fromkeys(name for row in rows for name in row.changes)
    for name in (*(name for name in ways if name in changed), *(name for name in changed if name not in ways)):
        way = ways[name] if isinstance(ways.get(name), dict) else {}
        listed = next((way[kind] for kind in ("grid", "choice") if isinstance(way.get(kind), list)), ())
        yield ShownField(name=name, logged="loguniform" in way, listed=listed[:MOST_TRIALS])
