"""A check in a process of its own: code in C++ may wait for ever, or end its process, and must not take ours along."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from raytune_fsdp.doctor.finding import Finding, failed, problem

Send = Callable[[Finding], None]


def run(work: Callable[..., None], *arguments: Any, check: str, seconds: float, hung: str) -> list[Finding]:
    """What `work(send, *arguments)` sends, within these seconds; `hung` says what to do if it takes longer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    found: list[Finding] = []
    deadline = time.monotonic() + seconds
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            sent = ours.recv()
            if sent is None:
                return found
            found.append(sent)
        return [*found, problem(check, f"no answer within {seconds:g} s", hung)]
    except EOFError:
        process.join(2)
        return [*found, problem(check, f"the process that asked ended ({process.exitcode}), without a message", hung)]
    finally:
        # One that is done ends by itself, which closes its connections in good order.
        process.join(0.0 if process.is_alive() and time.monotonic() >= deadline else 3.0)
        if process.is_alive():
            process.kill()
        ours.close()


def _work(out: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # C++ prints what it thinks of clusters that do not answer
        os.dup2(nowhere, number)
    try:
        work(out.send, *arguments)
    except Exception as error:
        out.send(failed("Ray", error))
    out.send(None)
