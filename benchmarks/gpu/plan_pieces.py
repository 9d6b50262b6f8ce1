"""Plan what the pieces of evidence will show, and which of them two commands will get to.

    python -m benchmarks.gpu.plan_pieces [--out benchmarks/gpu/plans.json]      plans every piece that trains, on CPUs
    python -m benchmarks.gpu.plan_pieces --simulate                             shows two commands, by these plans

A plan is made before its measurement, on a machine without a GPU, and stands beside it afterwards. How long a piece
takes follows from its plan and from guesses of what comes before the first step (plans.py); of pieces without a plan
it is a guess. All of these are there to order the work, and say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.evidence import LAST_SECONDS, limit_of
from benchmarks.gpu.plans import FILE, Plans
from benchmarks.gpu.process import CUT_OFF, DONE, NOT_HERE, Piece
from benchmarks.record import write_result
from raytune_fsdp.predict.devices import DEVICES, Device

CARDS = ("H100", "H200")
COMMANDS = (590.0, 170.0)
"""Seconds of both."""
BEGINNING = 30.0
"""Seconds of a command before its first piece, by a guess: wheels, imports, the look at the machine."""


class Turn(NamedTuple):
    """A piece in a simulated command."""

    command: int
    name: str
    status: str
    begins: float
    seconds: float


def machine_with(device: Device) -> dict[str, Any]:
    """Describe a bare machine with such a card."""
    installed = {"torch": "2.11.0", "torchao": "0.18.0", "peft": "0.18.0", "pytest": "9"}
    return {"device": device.name, "memory_gib": device.memory / 2**30, "capability": [9, 0], **installed}


def simulate(pieces: Sequence[Piece], device: Device, plans: Plans) -> Iterator[Turn]:
    """Yield what two commands would get to."""
    machine, left_over = machine_with(device), [*pieces]
    for number, seconds in enumerate(COMMANDS, 1):
        now, later = BEGINNING, []
        for piece in left_over:
            if piece.needs.lacking(machine):
                yield Turn(number, piece.name, NOT_HERE, now, 0)
                continue
            limit = limit_of(piece, seconds - LAST_SECONDS - now)
            if limit is None:
                later.append(piece)
                continue
            planned = plans.seconds(piece.name, device.name, piece.asked) if piece.asked else None
            takes = planned or piece.usual or piece.seconds
            yield Turn(number, piece.name, DONE if takes <= limit else CUT_OFF, now, min(takes, limit))
            now += min(takes, limit)
        left_over = later


def plan_of(asked: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Plan a run of a piece on one device."""
    from benchmarks.gpu.training import config_of
    from raytune_fsdp.predict.prediction import Cluster, predict
    from raytune_fsdp.predict.subject import ModelSpec

    config = config_of(Path("nowhere"), **asked)
    found = predict(ModelSpec.of(config), config, 1, Cluster(device=device, per_node=1))
    return {
        "step_seconds": found.seconds.step,
        "step_seconds_between": found.interval,
        "tokens_per_second": found.tokens_per_second,
        "tensors_gib": found.memory.total / 2**30,
        "gib": found.needed / 2**30,
        "fits": found.fits,
    }


def main() -> None:
    from benchmarks.gpu.pieces import pieces_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--only", nargs="*", default=[""], help="words of the pieces that are planned anew")
    arguments = parser.parse_args()
    if arguments.simulate:
        for card in CARDS:
            plans, device = Plans.read(), DEVICES[card]
            print(f"\n{card}, simulated:")
            for turn in simulate(pieces_of("full", device.memory / 2**30, plans), device, plans):
                print(f"command {turn.command}, {turn.begins:4.0f} s: {turn.name}: {turn.status}, {turn.seconds:.0f} s")
        return
    found = {} if not arguments.out.exists() else dict(Plans.read(arguments.out).pieces)
    every = {each.name: each for card in CARDS for each in pieces_of("full", DEVICES[card].memory / 2**30)}
    for name, piece in every.items():
        if piece.asked is None or not any(word in name for word in arguments.only):
            continue
        since = time.monotonic()
        cards = [card for card in CARDS if piece.needs.gib <= DEVICES[card].memory / 2**30]
        found[name] = {"asked": piece.asked, "cards": {card: plan_of(piece.asked, DEVICES[card]) for card in cards}}
        print(f"{name}: {time.monotonic() - since:.0f} s", flush=True)
        known = {name: found[name] for name in every if name in found}
        write_result(arguments.out, {"what": "planned, not measured: one rank on one card", "pieces": known})


if __name__ == "__main__":
    main()
