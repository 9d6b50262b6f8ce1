"""`raytune-fsdp stop`: let a run commit a checkpoint and end, from any machine that sees its directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import Parser, run_command, say
from raytune_fsdp.cli.runs import check_run, why_silent

_POLL_SECONDS = 0.2


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp stop") -> int:
    """Ask a run to stop, and wait until its command has ended; return the exit code."""
    parser = Parser(
        prog,
        "Let a run commit a checkpoint after its current step and end, from any machine that sees its directory. The "
        "command that trained it continues it.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="SECONDS", help="how long to wait for its end (default: 600)"
    )
    return run_command(parser, argv, _stop)


def _stop(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    from raytune_fsdp.checkpoint.on_demand import StopRequest
    from raytune_fsdp.launch.run_lock import Signs
    from raytune_fsdp.record.report.overview import overview

    place = check_run(found.run)
    stopping, signs, began = StopRequest(place.path), Signs(place), time.monotonic()
    name = printable(str(place.path))
    if signs.look() == "free":
        raise TrainingError(f"{why_silent(place)}; nothing was changed")
    try:
        while (state := signs.look()) != "free":
            stopping.ask()
            if state == "silent":
                raise TrainingError(f"{why_silent(place)}; nothing was changed")
            if time.monotonic() - began > found.wait:
                raise TrainingError(
                    f"{name} has not ended after {found.wait:g} s (--wait), and is no longer asked to: a run looks "
                    "between two steps, not before the first or during its last export; ask again, and wait for longer"
                )
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise TrainingError(f"{name}: cannot leave a request there ({error}); ask as a user who may") from error
    finally:
        stopping.leave()  # also after Ctrl-C: the run must not stop for a request that nobody waits for
    seen = overview(place.path)
    at = f"step {seen.step:,}" + (f" of {seen.steps:,}" if seen.steps is not None else "")
    if seen.ended == "failed":
        raise TrainingError(f"{name} has failed meanwhile, at {at}; what its ranks said: raytune-fsdp logs {name}")
    if seen.ended == "finished":
        say(f"{name} was finished before it could stop, at {at}")
    else:
        say(f"{name} has stopped, at {at}; the same command continues it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
