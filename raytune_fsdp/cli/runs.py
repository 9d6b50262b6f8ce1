"""`raytune-fsdp runs`: list the runs of a storage directory, how far each is, and which are alive."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import Parser, main_of, nearest, say
from raytune_fsdp.plan.run_dir import CHECKPOINTS, RunDir, check_links, checkpoints_of, is_run
from raytune_fsdp.record.report.overview import Overview, as_json, overview

_LOOK_SECONDS = 0.2


def parser_of(prog: str) -> Parser:
    parser = Parser(
        prog,
        "List the runs of a storage directory. A run is stale if its command has left a lock and gives no sign of life "
        "for ten seconds: it was killed, or its machine is lost. The same command continues it.",
    )
    parser.add_argument("storage", type=Path, nargs="?", default=Path("runs"), help="run.storage (default: runs)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for every run")
    parser.add_argument("--html", action="store_true", help="make one page of them, with filters, and of their sweeps")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="with --html: where to write it (default: runs.html in the storage)"
    )
    return parser


def _runs(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    _check(parser, found)
    if is_run(found.storage):
        parser.error(f"{found.storage} is a run itself; its storage is {found.storage.absolute().parent}")
    if not found.storage.is_dir():
        raise ResumeError(f"{found.storage}: no such directory; give the run.storage of your configs")
    places, refused = [], []
    for place in runs_in(found.storage):
        try:
            check_links(place.path)
            places.append(place)
        except ResumeError as error:
            refused.append(str(error))
    states = states_of(places)
    found_of = [(overview(each.path, productive=found.json), states[each.path]) for each in places]
    rows = sorted(found_of, key=lambda row: row[0].began or "")
    if found.html:
        say(_put_page(found.storage, rows, found.out))
    elif found.json:
        for each, state in rows:
            print(as_json(each, state or each.ended))
    elif rows:
        print("\n".join(table(rows)))
    elif not refused:
        say(f"{found.storage} has no runs")
    if refused:
        raise ResumeError(*refused)
    return 0


def _check(parser: Parser, found: Namespace) -> None:
    if found.out is not None and not found.html:
        parser.error("--out is for a page: give --html, too")
    if found.html and found.json:
        parser.error("--json prints, --html makes a page: give one of the two")


def _put_page(storage: Path, rows: Sequence[tuple[Overview, str]], place: Path | None) -> Path:
    from raytune_fsdp.record.report.page import write_page
    from raytune_fsdp.record.report.runs_page import runs_page
    from raytune_fsdp.tune.coordinates import sweeps_in

    out = place or storage / "runs.html"
    write_page(out, runs_page(storage, rows, out, *sweeps_in(storage)), private=place is None)
    return out


def runs_in(storage: Path) -> list[RunDir]:
    """Return the runs of a storage directory, also those that have only just begun."""
    from raytune_fsdp.tune.place import SWEEP_FILE

    places = []
    for path in sorted(storage.absolute().iterdir()):
        place = RunDir(path, str(path / CHECKPOINTS))
        with suppress(OSError):  # another user's run, which is not shared
            if path.is_dir() and (is_run(path) or (place.lock.is_file() and not (path / SWEEP_FILE).exists())):
                places.append(place)
    return places


def why_silent(place: RunDir) -> str:
    """Say why a run does not answer, by its lock and its record."""
    from raytune_fsdp.launch.run_lock import holder_of

    seen, path = overview(place.path), printable(str(place.path))
    at = seen.at
    if seen.ended == "finished":
        return f"{path} is finished, at {at}: it makes no more checkpoints (`checkpoint list` shows those it has)"
    if not place.lock.exists():
        return f"no command works on {path}, which is at {at}: the command that trained it continues it"
    return (
        f"{holder_of(place) or 'the command'}, which works on {path}, gives no sign of life, at {at}: if it was "
        "killed, or its machine is lost, the same command continues it"
    )


def check_run(path: Path) -> RunDir:
    """Return the run in a directory. If there is none, raises an error that names the runs nearby."""
    place = RunDir(path.absolute(), str(path.absolute()))
    if is_run(path) or place.lock.is_file():
        return RunDir(path.absolute(), checkpoints_of(path.absolute()))
    why = (
        "is not a run: it has no plan.json"
        if path.is_dir()
        else "no such directory"
        if not path.exists()
        else ("is not a directory")
    )
    for storage in (path, path.absolute().parent, Path("runs")):
        names: list[str] = []
        with suppress(OSError):
            names = [each.path.name for each in runs_in(storage)] if storage.is_dir() else []
        if names:
            shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            raise ResumeError(f"{path}: {why}; the runs in {storage} are {shown}{nearest(path.name, names)}")
    raise ResumeError(f"{path}: {why}; give a run directory, <run.storage>/<run.name>")


def states_of(places: Sequence[RunDir]) -> dict[Path, str]:
    """Return `running` or `stale` for each run that has a lock, an empty text for the others.

    Waits for their beats: two seconds if all are alive, else ten.
    """
    from raytune_fsdp.launch.run_lock import Signs

    signs = {place.path: Signs(place) for place in places}
    found: dict[Path, str] = {}
    while len(found) < len(signs):
        for path, each in signs.items():
            if path not in found and (seen := each.look()) is not None:
                found[path] = {"running": "running", "silent": "stale", "free": ""}[seen]
        if len(found) < len(signs):
            time.sleep(_LOOK_SECONDS)
    return found


def table(rows: Sequence[tuple[Overview, str]]) -> list[str]:
    """Return a line for every run, in columns, below a heading."""
    from raytune_fsdp.cli.region import clean
    from raytune_fsdp.record.console import aligned, duration

    cells = [("run", "state", "step", "loss", "best eval", "workers", "age")]
    for each, state in rows:
        steps = f"{each.step:,}/{each.steps:,}" if each.steps is not None else f"{each.step:,}"
        best = f"{each.best[0]:.4f} at {each.best[1]:,}" if each.best else "-"
        loss = "-" if each.loss is None else f"{each.loss:.4f}"
        age = seconds_since(each.began)
        cells.append((
            clean(each.path.name), state or each.ended, steps, loss, best, str(each.world or "-"),
            "-" if age is None else duration(age),
        ))  # fmt: skip
    return aligned(cells, right=(2, 3, 5, 6))


def seconds_since(moment: str | None) -> float | None:
    """Return how many seconds ago a moment was, if the clocks of both machines are right; None if it is not a time."""
    try:
        passed = (datetime.now(UTC) - datetime.fromisoformat(moment or "")).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, passed) if math.isfinite(passed) else None


main = main_of("runs", parser_of, _runs)

if __name__ == "__main__":
    raise SystemExit(main())
