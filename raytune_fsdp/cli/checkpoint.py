"""`raytune-fsdp checkpoint`: ask a run for a checkpoint now, list its checkpoints, verify them."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.cli.common import Parser, exit_code
from raytune_fsdp.errors import ResumeError, TrainingError

_POLL_SECONDS = 0.2


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp checkpoint") -> int:
    """Returns the exit code."""
    parser = Parser(prog, "The checkpoints of a run.")
    parser.add_argument(
        "what",
        choices=("now", "list", "verify"),
        help="now: commit one at the next step; list: show all; verify: read all files",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="SECONDS", help="how long `now` waits (default: 600)"
    )
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _run(parser, arguments))


def _run(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    if not found.run.is_dir():
        raise ResumeError(f"{found.run}: no such directory; give a run directory, <run.storage>/<run.name>")
    return {"now": _now, "list": _list, "verify": _verify}[found.what](found)


def _now(found: Namespace) -> int:
    from raytune_fsdp.checkpoint.on_demand import Asking

    asking = Asking(found.run)
    deadline = time.monotonic() + found.wait
    asking.ask()
    try:
        while (answer := asking.answer()) is None:
            if time.monotonic() > deadline:
                state = "began it but has not finished" if asking.taken() else "does not answer: is it training?"
                raise TrainingError(f"{found.run} {state} (--wait {found.wait:g}); nothing was changed")
            time.sleep(_POLL_SECONDS)
    finally:
        asking.leave()  # also after Ctrl-C: a question that nobody waits for must not be answered later
    if answer["path"] is None:
        raise TrainingError(f"the checkpoint of step {answer['step']} was not written: {answer['problem']}")
    print(f"step {answer['step']}: {answer['path']}")
    return 0


def _list(found: Namespace) -> int:
    from raytune_fsdp.checkpoint.catalogue import committed
    from raytune_fsdp.checkpoint.location import storage_at
    from raytune_fsdp.rundir import checkpoints_of
    from raytune_fsdp.tracking.console import gibibytes

    there = committed(checkpoints_of(found.run.absolute()))
    for each in there:
        size = sum(storage_at(each.root).sizes(each.name).values())
        print(f"step {each.step:>8,}  attempt {each.attempt:>3}  {gibibytes(size):>10}  {each.path}")
    if not there:
        print(f"{found.run} has no checkpoint")
    return 0


def _verify(found: Namespace) -> int:
    from raytune_fsdp.checkpoint.catalogue import committed, verify
    from raytune_fsdp.rundir import checkpoints_of

    damaged = 0
    there = committed(checkpoints_of(found.run.absolute()))
    for each in there:
        problem = verify(each, hashes=True)
        damaged += problem is not None
        print(f"step {each.step:>8,}  {problem or 'intact'}  {each.path}", flush=True)
    if damaged:
        raise ResumeError(
            f"{damaged} of {len(there)} checkpoints are damaged; the run continues from the newest intact one"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
