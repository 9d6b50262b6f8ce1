"""What people see of a sweep while it runs: a line for what happens, a table that folds, and where each trial is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.record.console import aligned
from raytune_fsdp.record.lines import step_of
from raytune_fsdp.record.report.overview import last_step, steps_of
from raytune_fsdp.record.screen_messages import tell
from raytune_fsdp.tune.log import Decision, Draw, Entry, TrialEnded, generation, trials_in
from raytune_fsdp.tune.space import run_name_in, run_name_of
from raytune_fsdp.tune.spec import SweepSpec
from raytune_fsdp.tune.table import OverSeeds, Standing, best_of, leaderboard

if TYPE_CHECKING:
    from raytune_fsdp.tune.running.runner import TrialRun

_ROWS = 8
"""The most rows of a table, and the most runs that a line names; others are counted."""
_MOST_CHARS = 60


class SweepBoard:
    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._fields: list[str] = []

    def say(self, text: str) -> None:
        print(printable(text), flush=True)

    def started(self, run: str, until: int | None) -> None:
        self.say(f"{run} trains {'to its end' if until is None else f'to step {until:,}'}")

    def failed(self, run: str, error: str, *, again: bool) -> None:
        self.say(f"{run} has failed{' and is tried again' if again else ' for good'}: {error}")

    def decided(self, log: Sequence[Entry], entries: Iterable[Entry], *, table: bool) -> None:
        """Tell what was added to the log. `table`: whether the table may follow; at the end the command prints it."""
        changed = False
        for entry in entries:
            if isinstance(entry, Decision):
                on, stop = (self._runs(trials, log, entry.step) for trials in (entry.on, entry.stop))
                self.say(f"after step {entry.step:,} these trials go on: {on}; these do not: {stop}")
            elif isinstance(entry, Draw):
                old, source = (self._run(trial, log, entry.step) for trial in (entry.trial, entry.source))
                new = self._run(entry.trial, log, entry.step + 1)
                self.say(f"after step {entry.step:,} {old} goes on from {source}, as {new}")
            changed = changed or isinstance(entry, Decision | Draw | TrialEnded)
        rows = leaderboard(log)
        if (best := best_of(rows)) is not None:
            over = f" (mean of {best.seeds} seeds)" if best.seeds > 1 else ""
            self._fields = [f"best {best.value:.4f}{over}: {self._name(best)}", _changes(best)]
        if changed and table and any(row.value is not None for row in rows):
            for line in self.table(rows):
                self.say(line)

    def table(self, rows: Sequence[Standing], most: int = _ROWS) -> list[str]:
        """Return the leaderboard in lines: the best trials, and how many others there are."""
        what = "value" if self._spec.seeds == 1 else f"mean of {self._spec.seeds} seeds"
        cells = [("trial", what, "step", "state", "changes")]
        for row in rows[:most]:
            value = "-" if row.value is None else f"{row.value:.4f}"
            cells.append((self._name(row), value, f"{row.step:,}", row.state, _changes(row)))
        lines = aligned(cells, right=(1, 2))
        if others := rows[most:]:
            states = Counter(row.state for row in others)
            said = ", ".join(f"{many} {state}" for state, many in states.most_common())
            lines.append(f"and {len(others)} more: {said}")
        return lines

    def over_seeds(self, rows: Sequence[OverSeeds]) -> list[str]:
        """Return in lines how trials compare over their seeds."""
        cells = [("trial", "metric", "at step", "seeds", "mean", "spread", "difference", "more than the seeds'")]
        for row in rows:
            difference = "-" if row.difference is None else f"{row.difference:+.4f}"
            if row.difference is not None and row.spread_of_difference is not None:
                difference += f" ± {row.spread_of_difference:.4f}"
            spread = "-" if row.spread is None else f"{row.spread:.4f}"
            said = {None: "-", True: "yes", False: "no"}[row.exceeds]
            name = run_name_in(self._spec.name, row.variant)
            cells.append(
                (name, row.metric, f"{row.step:,}", str(row.seeds), f"{row.mean:.4f}", spread, difference, said)
            )
        return aligned(cells, right=(2, 3))

    def show(self, runs: Iterable[TrialRun]) -> None:
        """Show on a terminal where the trials are that run."""
        running = [run for run in runs if run.child is not None]
        tell(title=f"sweep {self._spec.name}  {len(running)} running", fields=self._fields)
        for run in running:
            newest = last_step(run.place.metrics)
            total = run.until or steps_of(run.place.path) or 0
            tell(work=run.name, done=step_of(newest) if newest else 0, total=total)

    def _name(self, row: Standing) -> str:
        if row.seeds > 1:
            return run_name_in(self._spec.name, row.trial.variant)
        return run_name_of(self._spec, row.trial, row.generation)

    def _run(self, trial: int, log: Sequence[Entry], step: int) -> str:
        """Return the name of the run in which a trial has trained a step, or trains it next."""
        return run_name_of(self._spec, trials_in(log)[trial], generation(trial, log, step))

    def _runs(self, trials: Sequence[int], log: Sequence[Entry], step: int) -> str:
        names = ", ".join(self._run(trial, log, step) for trial in trials[:_ROWS]) or "none"
        return names + (f" and {len(trials) - _ROWS} more" if len(trials) > _ROWS else "")


def _changes(row: Standing) -> str:
    changes = row.changes.items()
    text = ", ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in changes)
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 1]}…"
