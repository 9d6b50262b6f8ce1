"""Run a check in another process: imports may take long, and calls in C++ may wait for ever or end their process.

The process says when its imports are done and it begins to ask something: only then does that question's clock run.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from raytune_fsdp.tools.doctor.deadline import TICK, Asked, Deadline
from raytune_fsdp.tools.doctor.finding import SLOW, Finding, failed, not_checked, problem

_END_SECONDS, _KILLED_SECONDS = 3.0, 0.2


@dataclass(frozen=True, slots=True)
class Question:
    """Says that the check now waits for something outside, named in `what`. An empty `what`: that has answered."""

    check: str
    what: str = ""
    hung: str = ""
    """What to do if it does not answer."""


Send = Callable[[object], None]
"""Takes a finding or a list of some, a question, anything else that `take` takes, and None at the end."""


def run_apart(
    work: Callable[..., None],
    *arguments: Any,
    checks: Mapping[str, str],
    deadline: Deadline,
    take: Callable[[object], None] | None = None,
) -> list[Finding]:
    """Return the findings that `work(send, *arguments)` sends until the deadline.

    `checks`: the names of its checks, each with the way to make it alone. `take` gets what is sent besides.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, next(iter(checks)), work, arguments), daemon=True)
    process.start()
    theirs.close()
    found: list[Finding] = []
    asked, about, patience = Asked(), Question(""), 0.0
    try:
        while deadline.left() and not asked.hangs():
            began = time.monotonic()
            if not ours.poll(min(TICK, deadline.left())):
                asked.tick(time.monotonic() - began)
                continue
            sent = ours.recv()
            if sent is None:
                patience = _END_SECONDS
                return found
            if isinstance(sent, Finding):
                found.append(sent)
            elif isinstance(sent, list):
                found += sent
            elif isinstance(sent, Question):
                about = sent
                asked.begin(sent.what)
            elif take is not None:
                take(sent)
        return [*found, *_late(found, asked, about, checks, deadline)]
    except EOFError:
        process.join(2)
        first = next((name for name in checks if name not in _names(found)), next(iter(checks)))
        said = f"the process that looked at it ended ({process.exitcode}), without a message"
        return [*found, problem(first, said, checks[first])]
    finally:
        # A process that is done ends by itself, and closes its connections properly.
        process.join(min(patience, deadline.left()))
        if process.is_alive():
            process.kill()
            process.join(_KILLED_SECONDS)
        ours.close()


def _late(
    found: list[Finding], asked: Asked, about: Question, checks: Mapping[str, str], deadline: Deadline
) -> Iterator[Finding]:
    """Yield a problem if what was asked hangs; the remaining checks count as not made."""
    why, hanging = SLOW, ""
    if asked.hangs():
        hanging, why = about.check, f"{asked.what} had to answer first"
        yield problem(hanging, f"{asked.what} has not answered for {asked.seconds:.0f} s", about.hung)
    elif asked.what:
        why = f"{asked.what} was asked for the last {asked.seconds:.0f} s; {SLOW}"
    missing = [name for name in checks if name not in _names(found) and name != hanging]
    for name in missing:
        yield not_checked(name, deadline.seconds, why, checks[name])
    if not missing and not hanging:
        name = [*checks][-1]
        yield not_checked(name, deadline.seconds, why, checks[name], part="the rest of it was ")


def _names(found: list[Finding]) -> set[str]:
    return {each.check for each in found}


def _work(out: Connection, check: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # C++ libraries print about clusters that do not answer
        os.dup2(nowhere, number)
    try:
        work(out.send, *arguments)
    except Exception as error:
        out.send(failed(check, error))
    out.send(None)
