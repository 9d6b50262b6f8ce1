"""`raytune-fsdp checkpoint`: ask a run for a checkpoint now, list its checkpoints, verify them, let torch read them."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.errors import ResumeError, TrainingError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed, verify
from raytune_fsdp.cli.common import Parser, add_trust, main_of, say
from raytune_fsdp.cli.runs import check_run, why_silent

_POLL_SECONDS = 0.2
_SILENT_SECONDS = 3.5
"""How long `now` waits for a sign of life: a command that works on the run beats every two seconds."""


def parser_of(prog: str) -> Parser:
    parser = Parser(prog, "The checkpoints of a run.")
    parser.add_argument(
        "what",
        choices=("now", "list", "verify", "metadata"),
        help="now: commit one at the next step; list: show all; verify: read all files; metadata: write the .metadata "
        "with which torch.distributed.checkpoint reads them",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="SECONDS", help="how long `now` waits (default: 600)"
    )
    add_trust(parser)
    return parser


def _run(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    return {"now": _now, "list": _list, "verify": _verify, "metadata": _metadata}[found.what](found)


def _now(found: Namespace) -> int:
    from raytune_fsdp.checkpoint.on_demand import Asking
    from raytune_fsdp.launch.run_lock import Signs

    place = check_run(found.run)
    asking, signs, taken = Asking(place.path), Signs(place), False
    try:
        began = heard = time.monotonic()
        asking.ask()
        while (answer := asking.answer()) is None:  # as long as the run shows a sign of life
            now = time.monotonic()
            if signs.look() == "running" or asking.taken() != taken:
                heard, taken = now, asking.taken()
            if now - heard > _SILENT_SECONDS:
                raise TrainingError(f"{why_silent(place)}; nothing was changed")
            if now - began > found.wait:
                state = "began it but has not finished" if taken else "does not answer: is it training?"
                raise TrainingError(
                    f"{printable(str(place.path))} {state} (--wait {found.wait:g}); nothing was changed"
                )
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise TrainingError(
            f"{printable(str(found.run))}: cannot leave a request there ({error}); ask as a user who may"
        ) from error
    finally:
        asking.leave()  # also after Ctrl-C: a request that nobody waits for must not be answered later
    if answer["path"] is None:
        raise TrainingError(f"the checkpoint of step {answer['step']} was not written: {answer['problem']}")
    say(f"step {answer['step']}: {answer['path']}")
    return 0


def _list(found: Namespace) -> int:
    from raytune_fsdp.checkpoint.location import storage_at
    from raytune_fsdp.record.console import gibibytes
    from raytune_fsdp.run.forks.pins import pins_of

    there, forks = _committed(found), [*pins_of(found.run)]
    for each in there:
        size = sum(storage_at(each.root).sizes(each.name).values())
        kept = ", ".join(Path(pin.child).name for pin in forks if pin.checkpoint == each.name)
        for_forks = f"  kept for {kept}" if kept else ""
        say(f"step {each.step:>8,}  attempt {each.attempt:>3}  {gibibytes(size):>10}  {each.path}{for_forks}")
    return 0


def _verify(found: Namespace) -> int:
    damaged = 0
    there = _committed(found)
    for each in there:
        problem = verify(each, hashes=True)
        damaged += problem is not None
        say(f"step {each.step:>8,}  {problem or 'intact'}  {each.path}")
    if damaged:
        raise ResumeError(
            f"{damaged} of {len(there)} checkpoints are damaged; the run continues from the newest intact one"
        )
    return 0


def _metadata(found: Namespace) -> int:
    from raytune_fsdp.tools.torch_metadata import METADATA_FILE, write_torch_metadata

    for each in _committed(found):
        said = "written" if write_torch_metadata(each) else "was there"
        say(f"step {each.step:>8,}  {METADATA_FILE} {said}  {each.path}")
    return 0


def _committed(found: Namespace) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a run; print a line if there are none. Raises an error if this is not a run."""
    from raytune_fsdp.plan.run_dir import checkpoints_of
    from raytune_fsdp.run.places import check_places

    run = found.run
    check_places(run, trusted=found.trust_places, base="")
    # Not `check_run` first: with `checkpoint.storage`, the directory that holds the checkpoints has no plan.
    there = committed(checkpoints_of(run.absolute())) if run.is_dir() else []
    if not there:
        say(f"{run} has no checkpoint in {check_run(run).checkpoints}")
    return there


main = main_of("checkpoint", parser_of, _run)

if __name__ == "__main__":
    raise SystemExit(main())
