"""All the evidence that a GPU can give, for a machine that one has for minutes.

    python -m benchmarks.gpu.evidence --out DIR --minutes 9 --continue FILE
    python -m benchmarks.gpu.evidence --out DIR --minutes 9 --continue FILE --device cpu --size tiny

Each call adds the pieces that FILE does not have yet, the most important first, and stops before the minutes are over:
a piece that might not end in time is left for the next call. FILE is written anew after every piece, so a call that is
killed loses only what it was doing. A piece that failed is tried once more, by a later call and after the new ones.
DIR gets the same as evidence-<date>.json, and for people as evidence-<date>.md.

Every piece runs in a process of its own, forked from a server that has imported torch, transformers and raytune_fsdp
but never touched CUDA. Needs neither Ray nor MLflow nor datasets; `pieces.py` says what is measured.
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
from datetime import UTC, date, datetime
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page, summary
from benchmarks.gpu.process import DONE, FAILED, NOT_HERE, UNDER_WAY, Piece, run_alone
from raytune_fsdp.base.durable import replace_durably

PRELOAD = ["torch", "torch.distributed", "transformers.models.llama.modeling_llama", "benchmarks.gpu.pieces"]
MOST_TRIES = 2
_LAST_SECONDS = 5.0
"""Of a call's minutes, to end in."""


class Evidence:
    """What has been found, in a file that is whole at any moment."""

    def __init__(self, file: Path, out: Path, pieces: Sequence[Piece], settings: dict[str, Any]) -> None:
        self.file, self.out, self.pieces = file, out, pieces
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
        tries = self.found.get(piece.name, {}).get("tries", 0) + 1
        call = len(self.values["calls"]) - 1
        self.found[piece.name] = {"kind": piece.kind, "status": UNDER_WAY, "tries": tries, "call": call}
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
            if record is not None and record["status"] in (FAILED, UNDER_WAY) and record["tries"] < MOST_TRIES
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
    for piece in evidence.missing():
        if time.monotonic() + piece.seconds > deadline:
            print(f"{piece.name}: left for the next call, it may take {piece.seconds:g} s", flush=True)
            continue
        evidence.begin(piece)
        since = time.monotonic()
        ending = run_alone(context, piece, device)
        evidence.end(piece, ending, time.monotonic() - since)
        print(f"{piece.name}: {summary(evidence.found[piece.name])}", flush=True)


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
    parser.add_argument("--minutes", type=float, default=9.0, help="how long this call may take")
    parser.add_argument("--continue", dest="file", type=Path, required=True, metavar="FILE", help="need not exist yet")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="full: models of 1B and 8B weights")
    arguments = parser.parse_args()
    context = start_server()
    from benchmarks.gpu.pieces import DESCRIBE, pieces_of

    settings = {"device": arguments.device, "size": arguments.size}
    try:
        evidence = Evidence(arguments.file, arguments.out, pieces_of(arguments.size), settings)
    except ValueError as error:
        parser.error(str(error))
    context, machine = choose_context(context, DESCRIBE, arguments.device)
    evidence.begin_call(machine)
    gather(evidence, context, device=arguments.device, deadline=began + 60 * arguments.minutes - _LAST_SECONDS)
    print(f"{len(evidence.missing())} pieces are left for another call; written: {arguments.file} and {arguments.out}")


if __name__ == "__main__":
    main()
