"""All the evidence that a GPU can give, for a machine that one has for minutes.

    python -m benchmarks.gpu.evidence --out DIR --seconds 590 --continue FILE [--only WORD ...]
    python -m benchmarks.gpu.evidence --out DIR --seconds 60 --continue FILE --device cpu --size tiny

Each call adds the pieces that FILE does not have yet, the most telling first, and ends before its seconds are over: the
last piece gets what is left, if that may do. What a piece has measured when it is ended stays. FILE is written anew
after every piece and every part of one, so a call that is killed loses only what it was doing. A piece that failed, or
was cut off, is tried once more, by a later call and after the new ones. What this machine lacks is said before anything
is begun. DIR gets the same as evidence-<date>.json, and for people as evidence-<date>.md.

Every piece runs in a process of its own, forked from a server that has imported torch, transformers and raytune_fsdp
but never touched CUDA. Needs neither Ray nor MLflow nor datasets; `pieces.py` says what is measured, `plans.json` what
was planned of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page, summary
from benchmarks.gpu.plans import Plans
from benchmarks.gpu.process import CUT_OFF, DONE, FAILED, NOT_HERE, UNDER_WAY, Piece, run_alone
from raytune_fsdp.base.durable import replace_durably

PRELOAD = ["torch", "torch.distributed", "transformers.models.llama.modeling_llama", "benchmarks.gpu.pieces"]
MOST_TRIES = 2
LAST_SECONDS = 5.0
"""Of a call, to end in."""


class Evidence:
    """What has been found, in a file that is whole at any moment."""

    def __init__(
        self, file: Path, out: Path, pieces: Sequence[Piece], settings: dict[str, Any], plans: Plans | None = None
    ) -> None:
        self.file, self.out, self.pieces, self.plans = file, out, pieces, plans or Plans()
        self.values: dict[str, Any] = {"settings": settings, "calls": [], "pieces": {}}
        if file.exists():
            self.values = json.loads(file.read_text(encoding="utf-8"))
            if self.values["settings"] != settings:
                raise ValueError(f"{file} is of {self.values['settings']}, not of {settings}: name another file")

    @property
    def found(self) -> dict[str, dict[str, Any]]:
        """What is known of pieces, by their names."""
        records: dict[str, dict[str, Any]] = self.values["pieces"]
        return records

    def begin_call(self, machine: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.values["calls"].append({"began": now, "command": sys.argv, **machine})

    def begin(self, piece: Piece) -> None:
        """Noted before it runs: what takes the whole machine down must not do so on every call."""
        before = self.found.get(piece.name, {})
        call = len(self.values["calls"]) - 1
        kept = {"result": before["result"]} if "result" in before else {}
        planned = self.plans.of(piece.name, self.values["calls"][call]["device"])
        self.found[piece.name] = {
            "kind": piece.kind, "status": UNDER_WAY, "tries": before.get("tries", 0) + 1, "call": call, **kept,
            **({} if planned is None else {"planned": planned}),
        }  # fmt: skip
        self.write()

    def keep(self, piece: Piece, part: dict[str, Any]) -> None:
        """Write down a part of what it will return."""
        self.found[piece.name] |= part
        self.write()

    def end(self, piece: Piece, ending: dict[str, Any], seconds: float) -> None:
        self.found[piece.name] |= {**ending, "seconds": round(seconds, 1)}
        self.write()

    def missing(self) -> list[Piece]:
        """The pieces to be run: those that were never tried before those to be tried again."""
        records = [(piece, self.found.get(piece.name)) for piece in self.pieces]
        fresh = [piece for piece, record in records if record is None]
        return fresh + [
            piece
            for piece, record in records
            if record is not None and record["status"] in (FAILED, CUT_OFF, UNDER_WAY) and record["tries"] < MOST_TRIES
        ]

    def write(self) -> None:
        text = json.dumps(self.values, indent=1) + "\n"
        name = self.out / f"evidence-{date.today().isoformat()}"
        markdown = page(self.values, self.pieces)
        for path, content in (
            (self.file, text),
            (name.with_suffix(".json"), text),
            (name.with_suffix(".md"), markdown),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(path, content)


def gather(evidence: Evidence, context: Any, *, device: str, deadline: float) -> None:
    """Run what is missing and fits into the time until `deadline`, by `time.monotonic`."""
    evidence.write()
    machine = evidence.values["calls"][-1]
    for piece in evidence.missing():
        if lack := piece.needs.lacking(machine):
            evidence.begin(piece)
            evidence.end(piece, {"status": NOT_HERE, "error": lack}, 0)
            print(f"{piece.name}: {summary(evidence.found[piece.name])}", flush=True)
            continue
        limit = limit_of(piece, left := deadline - time.monotonic())
        if limit is None:
            print(f"{piece.name}: left for the next call, {left:.0f} s are too few for it", flush=True)
            continue
        evidence.begin(piece)
        since = time.monotonic()
        ending = run_alone(context, replace(piece, seconds=limit), device, partial(evidence.keep, piece))
        evidence.end(piece, ending, time.monotonic() - since)
        print(f"{piece.name}: {summary(evidence.found[piece.name])}", flush=True)


def limit_of(piece: Piece, left: float) -> float | None:
    """Return the seconds that a piece may take where so many are left; None: it is not begun."""
    return None if left < min(piece.seconds, piece.least or piece.seconds) else min(piece.seconds, left)


def start_server() -> Any:
    """The context of a server that imports what pieces need, while this process does the same."""
    # Without it, whatever asks while it is imported whether there is a GPU makes CUDA refuse to start in a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return context


def choose_context(forking: Any, describe: Piece, device: str) -> tuple[Any, dict[str, Any]]:
    """`forking`, or a slower one if the device does not work in its processes; and the machine."""
    error = ""
    for context in (forking, mp.get_context("spawn")):
        ending = run_alone(context, describe, device)
        if ending["status"] == DONE:
            return context, {**ending["result"], "processes": context.get_start_method(), "commit": _commit()}
        error = ending["error"]
        if ending["status"] == NOT_HERE:
            break
    raise SystemExit(f"--device {device}: {error}")


def _commit() -> str | None:
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the page and a copy of FILE")
    parser.add_argument("--seconds", type=float, default=590.0, help="how long this call may take")
    parser.add_argument("--continue", dest="file", type=Path, required=True, metavar="FILE", help="need not exist yet")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="full: models of 1B to 8B weights")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="pieces with such a word in their name")
    arguments = parser.parse_args()
    context = start_server()
    from benchmarks.gpu.pieces import DESCRIBE, pieces_of

    context, machine = choose_context(context, DESCRIBE, arguments.device)
    plans = Plans.read()
    pieces = [
        piece
        for piece in pieces_of(arguments.size, machine.get("memory_gib"), plans)
        if any(word in piece.name for word in arguments.only)
    ]
    settings = {"device": arguments.device, "size": arguments.size}
    try:
        evidence = Evidence(arguments.file, arguments.out, pieces, settings, plans)
    except ValueError as error:
        parser.error(str(error))
    evidence.begin_call(machine)
    gather(evidence, context, device=arguments.device, deadline=began + arguments.seconds - LAST_SECONDS)
    print(f"{len(evidence.missing())} pieces are left for another call; written: {arguments.file} and {arguments.out}")


if __name__ == "__main__":
    main()
