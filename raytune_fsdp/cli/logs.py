"""`raytune-fsdp logs`: show what the ranks of a run have printed, on all nodes, from the files in its directory."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import LINE_BYTES, NULS, UnsoundError, open_regular, reason
from raytune_fsdp.cli.common import Parser, main_of
from raytune_fsdp.cli.region import clean
from raytune_fsdp.cli.runs import check_run
from raytune_fsdp.plan.run_dir import RunDir

_POLL_SECONDS = 0.5
_ALIVE = ("running", None)


def parser_of(prog: str) -> Parser:
    parser = Parser(prog, "Show what the ranks of a run under Ray have printed.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank (default: all)")
    parser.add_argument("--attempt", type=int, metavar="N", help="this attempt (default: the newest)")
    parser.add_argument("--lines", type=int, metavar="N", help="only the last N lines of each rank")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    return parser


def _logs(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    if found.lines is not None and found.lines < 0:
        parser.error(f"--lines {found.lines}: must be 0 or more")
    place = check_run(found.run)
    from raytune_fsdp.launch.run_lock import Signs

    signs = Signs(place)
    state = signs.look()
    try:
        while found.follow and state in _ALIVE and not attempts_of(place):  # the run still prepares
            time.sleep(_POLL_SECONDS)
            state = signs.look()
        logs = _Logs(place, found, alive=state in _ALIVE)
        logs.look(found.lines)
        while found.follow and state in _ALIVE:
            time.sleep(_POLL_SECONDS)
            state = signs.look()
            logs.look(last=state not in _ALIVE)
    except KeyboardInterrupt:
        if not found.follow:
            raise
    return 0


def attempts_of(place: RunDir) -> list[int]:
    """Return the attempts that have logs."""
    return sorted(_numbers(place.path / "logs", "attempt-", ""))


def _numbers(directory: Path, before: str, after: str) -> Iterator[int]:
    for each in directory.iterdir() if directory.is_dir() else ():
        number = each.name.removeprefix(before).removesuffix(after)
        if each.name == f"{before}{number}{after}" and number.isascii() and number.isdigit() and len(number) < 10:
            yield int(number)


def _files(place: RunDir, attempt: int | None, rank: int | None, *, alive: bool) -> dict[int, Path]:
    """Return the log of each rank that is asked for. If there is none, raises an error that names those that exist."""
    attempts = attempts_of(place)
    if not attempts:
        without = "only Ray keeps the output of ranks in files; without Ray it was printed with the command's own"
        raise ResumeError(f"{place.path} has no logs: {'its ranks have not started yet' if alive else without}")
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        raise ResumeError(f"--attempt {chosen}: {place.path.name} has logs of {_listed('attempt', attempts)}")
    ranks = sorted(_numbers(place.logs(chosen), "rank-", ".log"))
    if rank is not None and rank not in ranks:
        there = _listed("rank", ranks) if ranks else "no rank yet"
        raise ResumeError(f"--rank {rank}: attempt {chosen} of {place.path.name} has logs of {there}")
    return {each: place.log(chosen, each) for each in ranks if rank is None or each == rank}


def _listed(what: str, numbers: Sequence[int]) -> str:
    """Name numbers as in `rank 0`, `ranks 0 to 7` or `attempts 1, 3`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"{what} {first}"
    together = len(numbers) > 2 and last - first + 1 == len(numbers)
    return f"{what}s " + (f"{first} to {last}" if together else ", ".join(map(str, numbers)))


class _Logs:
    """The logs that are asked for, each read from where the last look ended."""

    def __init__(self, place: RunDir, asked: Namespace, *, alive: bool) -> None:
        self._place, self._asked = place, asked
        self._files = _files(place, asked.attempt, asked.rank, alive=alive)
        self._ends: dict[Path, int] = {}

    def look(self, count: int | None = None, *, last: bool = False) -> None:
        """Print what is new; only the last `count` lines of each log, if `count` is given. `last`: no look follows."""
        with suppress(ResumeError):  # another attempt follows, and the rank may not be there yet
            self._files = _files(self._place, self._asked.attempt, self._asked.rank, alive=True)
        for rank, path in self._files.items():
            lines = self._new(path, whole=last or not self._asked.follow)
            for line in lines if count is None else deque(lines, maxlen=count):
                text = clean(line.decode(errors="replace").rstrip("\n"))
                print(f"rank {rank} | {text}" if self._asked.rank is None else text, flush=True)

    def _new(self, path: Path, *, whole: bool) -> Iterator[bytes]:
        """Yield lines finished since the last look. `whole`: also a last line that is not finished."""
        try:
            with os.fdopen(open_regular(path, links=True), "rb") as file:
                file.seek(self._ends.get(path, 0))
                nuls = 0
                while (line := file.readline(LINE_BYTES)) and (nuls := nuls + line.count(0)) <= NULS:
                    if not line.endswith(b"\n") and not whole and len(line) < LINE_BYTES:
                        break
                    self._ends[path] = file.tell()
                    yield line
        except (OSError, UnsoundError) as error:
            raise ResumeError(f"{path} cannot be read: {reason(error)}") from error


main = main_of("logs", parser_of, _logs)

if __name__ == "__main__":
    raise SystemExit(main())
