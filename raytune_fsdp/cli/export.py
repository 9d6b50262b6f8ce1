"""`raytune-fsdp export`: write a committed checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.cli.common import BASE, TRUST, Parser, add_trust, main_of, say
from raytune_fsdp.launch.signals import Signals


def parser_of(prog: str) -> Parser:
    parser = Parser(prog, "Write a checkpoint as a Hugging Face model directory. Needs no GPU.")
    parser.add_argument("source", help="run directory (its newest checkpoint) or one checkpoint, as path or URL")
    parser.add_argument("destination", type=Path, help="directory to write; replaces a model that is there")
    parser.add_argument("--dtype", choices=("trained", "bf16", "fp16", "fp32"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--merge", action="store_true", help="merge adapters into their base, and export the whole model"
    )
    parser.add_argument("--max-file-bytes", type=int, default=5_000_000_000, metavar="N", help="default: 5 GB")
    parser.add_argument("--push", metavar="NAME", help="then push it to the hub as owner/name; needs HF_TOKEN")
    parser.add_argument(
        "--private",
        action=BooleanOptionalAction,
        default=True,
        help="make a repository that --push creates private (default); --no-private: as its owner's account decides",
    )
    add_trust(
        parser,
        base=f"{BASE}. Also for a multimodal model whose tower was not trained",
        code=f"{TRUST}; it is copied, not run",
    )
    return parser


def _export(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    parser.check_least(found, "--max-file-bytes", 1000)
    from raytune_fsdp.checkpoint.model_files import find_checkpoint
    from raytune_fsdp.config import ExportConfig
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.run.publish import publish

    chosen = ExportConfig(
        dtype=found.dtype,
        merge=found.merge,
        max_file_bytes=found.max_file_bytes,
        push=found.push,
        private=found.private,
    )
    if chosen.push is not None:
        from raytune_fsdp.model.directory.hub_push import check_push

        check_push(chosen.push)  # before the export, which may take long
    check_places(found.source, trusted=found.trust_places, base=found.base, exports=True)
    checkpoint = find_checkpoint(found.source)
    with Signals("during the export; the same command makes it again"):
        pushed = publish(
            checkpoint, found.destination, chosen,
            verified=True, trust_remote_code=found.trust_remote_code, base=found.base,
        )  # fmt: skip
    say(f"exported {checkpoint.path} to {found.destination}")
    if pushed is not None:
        say(f"pushed to {pushed}")
    return 0


main = main_of("export", parser_of, _export)

if __name__ == "__main__":
    raise SystemExit(main())
