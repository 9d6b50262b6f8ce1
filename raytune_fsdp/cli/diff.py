"""`raytune-fsdp diff`: the first step at which two runs part, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.errors import UserError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import Parser, main_of

PART = 1
"""The exit code for runs that part; `diff` has the same for files that differ."""


def parser_of(prog: str) -> Parser:
    parser = Parser(
        prog,
        "Compare two runs step by step, and name the first step at which they part and what may have caused it. Exit "
        "code 1: they part.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("other", type=Path, help="the other run's directory")
    return parser


def _diff(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    from raytune_fsdp.record.report.difference import difference

    there = difference(found.run, found.other)
    if there.step is None and not there.equal and not there.related:
        raise UserError(f"{there.words} Compare runs that have trained the same steps")
    print(printable(there.words))
    if there.step is not None:
        print("what differs, the likeliest cause first:" if there.causes else "nothing else on record differs")
        for cause in there.causes:
            print(f"  {printable(cause.words)}")
    for sentence in (*there.related, *there.unknown):
        print(printable(sentence))
    return 0 if there.step is None else PART


main = main_of("diff", parser_of, _diff)

if __name__ == "__main__":
    raise SystemExit(main())
