"""`raytune-fsdp plan --calibrate FILE`: measure this machine, so that runs on it can be planned anywhere."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from raytune_fsdp.cli.common import ConfigParser
from raytune_fsdp.predict.devices import Calibration, check_writable, write_calibration


def add_flags(parser: ConfigParser) -> None:
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE",
        help="measure this machine for about a minute, by --world-size ranks at a time (default: its GPUs, or 1), and "
        "write FILE, for --gpu FILE; needs no config",
    )  # fmt: skip


def calibrate_here(parser: ConfigParser, found: Namespace, overrides: list[str]) -> int:
    """Measure this machine and write the file; return the exit code."""
    path: Path = found.calibrate
    if found.config or overrides or found.gpu or found.search:
        parser.error(f"--calibrate {path} measures this machine and plans nothing: plan after it, with --gpu {path}")
    check_writable(path)
    from raytune_fsdp.launch.environment import environment
    from raytune_fsdp.launch.quiet import ignoring_warnings, quieting
    from raytune_fsdp.launch.signals import deaf_children

    with environment(quieting()), ignoring_warnings(), deaf_children():
        import torch

        from raytune_fsdp.predict.calibrate import calibrate

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        ranks = found.world_size or gpus or 1
        if gpus and ranks > gpus:
            parser.error(f"--world-size {ranks}: this machine has {gpus} GPUs, and each rank measures one of its own")
        print(f"measuring this machine with {ranks} rank(s), which takes about a minute", file=sys.stderr)
        # Each rank gets as many threads as in a run (launch/local.py).
        made = calibrate(ranks, max(1, (os.cpu_count() or 1) // ranks))
    write_calibration(made, path)
    print("\n".join(_in_words(made)))
    print(f"{'written':12} {path}: plan with --gpu {path} --world-size N")
    return 0


def _in_words(made: Calibration) -> list[str]:
    products = {key: max(rate for *_, rate in surface.points) / 1e9 for key, surface in made.products.items()}
    rows = {
        "device": f"{made.device}, {made.ranks} rank(s) at a time"
        + (f", {made.threads} thread(s) each" if made.kind == "cpu" else ""),
        "products": f"up to {products['2']:,.0f} GFLOP/s in 16 bits, {products['4']:,.0f} in 32 bits, of each rank",
        "memory": f"up to {max(rate for *_, rate in made.elementwise.points) / 1e9:,.1f} GB/s read and written",
        "operation": f"{1e6 * made.per_operation:.1f} µs of the host",
    }
    if made.ranks > 1:
        rows["collectives"] = (
            f"{made.gathering / 1e9:,.2f} GB/s gathered, {made.reducing / 1e9:,.2f} GB/s reduced, "
            f"{1e6 * made.per_collective:,.0f} µs each"
        )
    steps = " and ".join(f"{share:.0%} in {8 * int(key)} bits" for key, share in made.reached.items())
    rows["real steps"] = f"reach {steps} of the speed that their kernels have alone"
    return [f"{name:12} {value}" for name, value in rows.items()]
