"""`raytune-fsdp stop`: let a run commit a checkpoint and end, from any machine that sees its directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import Parser, main_of, say
from raytune_fsdp.cli.runs import check_run, why_silent
from raytune_fsdp.plan.run_dir import RunDir, is_run
from raytune_fsdp.record.report.overview import overview
from raytune_fsdp.tune.place import SWEEP_FILE

_POLL_SECONDS = 0.2


def parser_of(prog: str) -> Parser:
    parser = Parser(
        prog,
        "Let a run commit a checkpoint after its current step and end, from any machine that sees its directory. The "
        "command that trained it continues it.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="SECONDS", help="how long to wait for its end (default: 600)"
    )
    return parser


def _stop(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    from raytune_fsdp.checkpoint.on_demand import StopRequest
    from raytune_fsdp.launch.run_lock import Signs

    place = check_run(found.run)
    signs, began, heard = Signs(place), time.monotonic(), False
    name, state = printable(str(place.path)), signs.look()
    if state == "free":
        raise TrainingError(f"{why_silent(place)}; nothing was changed")
    owner = signs.owner
    request = StopRequest(place.path, owner or "")
    try:
        while True:
            if state == "silent" and not heard:  # one that was heard of may only have storage that is slow
                raise TrainingError(f"{why_silent(place)}; nothing was changed")
            heard = heard or state == "running"
            request.ask()
            if time.monotonic() - began > found.wait:
                raise TrainingError(
                    f"{name} has not ended after {found.wait:g} s (--wait), and is no longer asked to; ask again, and "
                    "wait for longer"
                )
            time.sleep(_POLL_SECONDS)
            state = signs.look()
            if state == "free" or signs.owner != owner:
                break
    except OSError as error:
        raise TrainingError(f"{name}: cannot leave a request there ({error}); ask as a user who may") from error
    finally:
        request.leave()  # also after Ctrl-C: the run must not stop for a request that nobody waits for
    if state != "free":
        raise TrainingError(f"{name}: the command that was asked has ended, and another one works on the run now")
    say(_how_it_ended(place))
    return 0


def _how_it_ended(place: RunDir) -> str:
    """Say how a run has stopped; raise TrainingError if something after its newest checkpoint is lost."""
    from raytune_fsdp.checkpoint.catalogue import committed

    name = printable(str(place.path))
    if (place.path / SWEEP_FILE).exists():
        return f"{name} has stopped; the same command continues it"
    if not is_run(place.path):
        return f"{name} has ended and left nothing, as a dry run or an audit does"
    seen = overview(place.path)
    at = seen.at
    if seen.ended == "failed":
        raise TrainingError(f"{name} has failed meanwhile, at {at}; what its ranks said: raytune-fsdp logs {name}")
    if seen.ended == "finished":
        return f"{name} was finished before it could stop, at {at}"
    saved = max((each.step for each in committed(place.checkpoints)), default=0)
    if saved < seen.step:
        whence = f"that of step {saved:,}" if saved else "none at all"
        raise TrainingError(
            f"{name} has ended at {at}, but its newest checkpoint is {whence}: the same command continues from there"
        )
    return f"{name} has stopped, at {at}, which is saved; the same command continues it"


main = main_of("stop", parser_of, _stop)

if __name__ == "__main__":
    raise SystemExit(main())
