"""How much of the time of a long run is training, by the number of GPUs, the interval of checkpoints and their cost.

    python -m benchmarks.productive [--stall 0.5] [--recovery 57.4] [--out benchmarks/results/productive.json]

A simulation without Ray: failures come at random (exponentially, one in so many GPU hours), each costs the steps since
the last checkpoint and the time until the next step is trained; a checkpoint holds training up for `stall` seconds, and
one that is being written when a failure comes does not count. Small clusters and spot machines have more failures than
Llama 3's run. `recovery` is for a real cluster, with a large model to load; on this repository's test machine it is
9 s (docs/results.md). The tables after the first are `plan/failures.py`'s estimates, which `raytune-fsdp plan` uses.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.record import write_result
from raytune_fsdp.plan.failures import GPU_HOURS, RECOVERY_SECONDS, STALL_SECONDS, WRITE_SECONDS, Failures, Recovery

GPUS = (64, 512, 4096)
HOURS_BETWEEN = (GPU_HOURS, 10_000.0)
"""GPU hours between two failures: that of Llama 3's run, and five times as many failures."""
INTERVALS = (60.0, 300.0, 900.0, 3600.0)
"""Seconds between two checkpoints."""
DAYS = 365.0
ESTIMATED = (8, 16, 32, 64, 128, 256, 512)


def share(
    gpus: int, hours: float, interval: float, stall: float, recovery: float, seed: int, days: float = DAYS
) -> float:
    """Of the time, the part in which steps are trained that count in the end."""
    draw = random.Random(seed)
    mean = hours * 3600 / gpus
    total = days * 86_400
    clock = useful = 0.0
    while clock < total:
        until = min(draw.expovariate(1 / mean), total - clock)  # of running, to the next failure
        cycle = interval + stall
        saves = max(0, int((until - WRITE_SECONDS) // cycle))
        useful += saves * interval
        clock += until + recovery
    return useful / clock


def again(failures: Failures, interval: float) -> float:
    """Return the mean seconds of training that a failure costs, with this interval."""
    whole = failures.apart + failures.recovery
    held_up = failures.stall * failures.apart / (interval + failures.stall)
    return whole * (1 - failures.share(interval)) - failures.recovery - held_up


def estimates(hours: float, stall: float) -> Iterator[str]:
    """Yield the rows of a table: what a failure costs in seconds, part by part, and the share that is left."""
    one = Recovery()
    columns = ("GPUs", "one in", "best interval", "notice, end", "start", "imports", "load", "again", "sum", "trained")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for gpus in ESTIMATED:
        found = Failures(gpus=gpus, gpu_hours=hours, stall=stall)
        best = found.best_interval()
        trained = again(found, best)
        parts = [*asdict(one).values(), trained, one.seconds + trained]
        yield (
            f"| {gpus} | {found.apart / 86_400:,.1f} days | {best / 60:.0f} min | "
            + " | ".join(f"{each:,.1f} s" if each < 100 else f"{each:,.0f} s" for each in parts)
            + f" | {found.share(best):.2%} |".replace("%", " %")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stall", type=float, default=STALL_SECONDS, help="seconds that a checkpoint holds training up"
    )
    parser.add_argument(
        "--recovery", type=float, default=RECOVERY_SECONDS, help="seconds from a failure to the next step"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    print("| GPUs | GPU hours per failure | " + " | ".join(f"every {int(each)} s" for each in INTERVALS) + " |")
    print("|---" * (2 + len(INTERVALS)) + "|")
    for gpus in GPUS:
        for hours in HOURS_BETWEEN:
            found = [
                share(gpus, hours, interval, arguments.stall, arguments.recovery, seed=1) for interval in INTERVALS
            ]
            rows.append(
                {"gpus": gpus, "gpu_hours_per_failure": hours, "share": dict(zip(INTERVALS, found, strict=True))}
            )
            print(f"| {gpus:,} | {hours:,.0f} | " + " | ".join(f"{100 * each:.2f} %" for each in found) + " |")
    for hours in HOURS_BETWEEN:
        print(f"\nestimates, one failure in {hours:,.0f} GPU hours\n")
        print("\n".join(estimates(hours, arguments.stall)))
    if arguments.out is not None:
        write_result(arguments.out, {"stall": arguments.stall, "recovery": arguments.recovery, "rows": rows})


if __name__ == "__main__":
    main()
