"""`raytune-fsdp export`: a committed checkpoint in, a Hugging Face model directory out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.cli.common import Parser, exit_code


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp export") -> int:
    """Export; returns the exit code."""
    parser = Parser(prog, "Write a checkpoint as a Hugging Face model directory. Needs no GPU.")
    parser.add_argument("source", help="run directory (its newest checkpoint), or one checkpoint; also as URL")
    parser.add_argument("destination", type=Path, help="directory to write; one that is there is replaced")
    parser.add_argument("--dtype", choices=("trained", "bf16", "fp16", "fp32"), default="bf16", help="default: bf16")
    parser.add_argument("--max-file-bytes", type=int, default=5_000_000_000, metavar="N", help="default: 5 GB")
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _export(parser, arguments))


def _export(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    if found.max_file_bytes < 1:
        parser.error(f"--max-file-bytes {found.max_file_bytes} must be at least 1")
    from raytune_fsdp.checkpoint.export import export_checkpoint, find_checkpoint

    checkpoint = find_checkpoint(found.source)
    export_checkpoint(checkpoint, found.destination, dtype=found.dtype, max_file_bytes=found.max_file_bytes)
    print(f"exported {checkpoint.path} to {found.destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
