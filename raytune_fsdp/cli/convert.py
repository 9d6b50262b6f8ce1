"""`raytune-fsdp convert`: turn another trainer's config into one of ours, and say what became of each key."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.common import Parser, main_of, say, write_new

_PROJECTS = (
    *("axolotl", "trl", "trl-dpo", "trl-kto", "trl-orpo", "trl-cpo", "trl-reward", "trl-gkd"),
    *("llama-factory", "torchtune", "accelerate", "deepspeed"),
)


def parser_of(prog: str) -> Parser:
    parser = Parser(
        prog, "Turn another trainer's config into one of ours. What cannot be carried is named, never lost."
    )
    # Optional only for the parser: in `--drop KEY FILE` it takes the file for a key.
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="YAML or JSON file of the other trainer, or of an older version"
    )
    parser.add_argument(
        "--from", dest="project", choices=_PROJECTS, help="the trainer (default: the one that knows most of its keys)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs that it was meant for: its batch is per GPU")
    parser.add_argument(
        "--teacher", metavar="MODEL", help="the model to learn from, of a file that does not name it (axolotl's kd)"
    )
    parser.add_argument(
        "--drop",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="convert as if the file did not have these; may be given again",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the config there (default: print it)")
    return parser


def _run(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    parser.check_least(found, "--gpus")
    file, drop = found.file, list(found.drop)
    if file is None:
        if len(drop) < 2 or not Path(drop[-1]).is_file():
            taken = f": --drop took {' '.join(drop)} for keys; name the file before --drop" if drop else ""
            parser.error(f"FILE is missing{taken or ': name the YAML file of the other trainer'}")
        file = drop.pop()
    from raytune_fsdp.convert.file import convert

    converted = convert(file, project=found.project, gpus=found.gpus, drop=drop, teacher=found.teacher)
    print(converted.report(), file=sys.stderr)
    if converted.problems:
        raise ConfigError(*converted.problems)
    text = converted.config(file)
    if found.out is None:
        print(text, end="")
        return 0
    write_new(found.out, text)
    say(f"written to {found.out}")
    if not converted.project.fragment:
        say(f"then: raytune-fsdp data preview --config {found.out}")
    return 0


main = main_of("convert", parser_of, _run)

if __name__ == "__main__":
    raise SystemExit(main())
