"""`raytune-fsdp average`: the mean of a run's checkpoints, as a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.cli.common import BASE, TRUST, Parser, add_trust, main_of, say


def parser_of(prog: str) -> Parser:
    parser = Parser(prog, "Write the mean of checkpoints of a run as a Hugging Face model directory. Needs no GPU.")
    parser.add_argument("run", help="run directory, or the URL of its checkpoints")
    parser.add_argument("destination", type=Path, help="directory to write; replaces a model that is there")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, metavar="N", help="the newest N checkpoints (default: 3, or both of two)")
    which.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="the checkpoints of these steps")
    parser.add_argument("--dtype", choices=("trained", "bf16", "fp16", "fp32"), default="bf16", help="default: bf16")
    parser.add_argument("--max-file-bytes", type=int, default=5_000_000_000, metavar="N", help="default: 5 GB")
    add_trust(parser, base=BASE, code=f"{TRUST}; it is copied, not run")
    return parser


def _average(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    parser.check_least(found, "--max-file-bytes", 1000)
    if found.last is not None and found.last < 2:
        parser.error(f"--last {found.last} must be at least 2; for one checkpoint, use `raytune-fsdp export`")
    from raytune_fsdp.config import ExportConfig
    from raytune_fsdp.launch.signals import Signals
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.run.publish import average, checkpoints_to_average

    check_places(found.run, trusted=found.trust_places, base=found.base, exports=True)
    checkpoints = checkpoints_to_average(found.run, steps=found.steps, last=found.last)
    chosen = ExportConfig(dtype=found.dtype, max_file_bytes=found.max_file_bytes)
    with Signals("during the export; the same command makes it again"):
        average(checkpoints, found.destination, chosen, trust_remote_code=found.trust_remote_code, base=found.base)
    steps = ", ".join(str(each.step) for each in checkpoints)
    say(f"exported the mean of steps {steps} to {found.destination}")
    return 0


main = main_of("average", parser_of, _average)

if __name__ == "__main__":
    raise SystemExit(main())
