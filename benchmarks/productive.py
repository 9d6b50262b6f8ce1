"""How much of the time of a long run is training, by the number of GPUs, the interval of checkpoints and their cost.

    python -m benchmarks.productive [--stall 0.5] [--recovery 60] [--out benchmarks/results/productive.json]

A simulation without Ray: failures come at random (exponentially, one in so many GPU hours), each costs the steps since
the last checkpoint and the time until the next step is trained; a checkpoint holds training up for `stall` seconds, and
one that is being written when a failure comes does not count. Llama 3's 54 days on 16,384 GPUs had 419 unexpected
interruptions, one in 50,700 GPU hours; small clusters and spot machines have more. `recovery` is for a real cluster,
with a large model to load; on this repository's test machine it is 14 s (docs/results.md).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.record import write_result

GPUS = (64, 512, 4096)
HOURS_BETWEEN = (50_700.0, 10_000.0)
"""GPU hours between two failures: that of Llama 3's run, and five times as many failures."""
INTERVALS = (60.0, 300.0, 900.0, 3600.0)
"""Seconds between two checkpoints."""
WRITE_SECONDS = 30.0
"""From the copy to the commit, while training goes on."""
DAYS = 365.0


def share(gpus: int, hours: float, interval: float, stall: float, recovery: float, seed: int) -> float:
    """Of the time, the part in which steps are trained that count in the end."""
    draw = random.Random(seed)
    mean = hours * 3600 / gpus
    total = DAYS * 86_400
    clock = useful = 0.0
    while clock < total:
        until = min(draw.expovariate(1 / mean), total - clock)  # of running, to the next failure
        cycle = interval + stall
        saves = max(0, int((until - WRITE_SECONDS) // cycle))
        useful += saves * interval
        clock += until + recovery
    return useful / clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stall", type=float, default=0.5, help="seconds that a checkpoint holds training up")
    parser.add_argument("--recovery", type=float, default=60.0, help="seconds from a failure to the next step")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    print("GPUs  GPU hours per failure  " + "  ".join(f"{int(each):>6} s" for each in INTERVALS))
    for gpus in GPUS:
        for hours in HOURS_BETWEEN:
            found = [
                share(gpus, hours, interval, arguments.stall, arguments.recovery, seed=1) for interval in INTERVALS
            ]
            rows.append(
                {"gpus": gpus, "gpu_hours_per_failure": hours, "share": dict(zip(INTERVALS, found, strict=True))}
            )
            print(f"{gpus:4}  {hours:21,.0f}  " + "  ".join(f"{each:8.2%}" for each in found))
    if arguments.out is not None:
        write_result(arguments.out, {"stall": arguments.stall, "recovery": arguments.recovery, "rows": rows})


if __name__ == "__main__":
    main()
