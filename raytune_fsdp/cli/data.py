"""`raytune-fsdp data`: look at the data, count it, remove old prepared data."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.common import RUNS_CODE, ConfigParser, Parser, add_trust, exit_code, nearest, parse_for_data, say
from raytune_fsdp.cli.progress import show_progress

if TYPE_CHECKING:
    from raytune_fsdp.data.windows import Windows

COMMANDS = {
    "preview": "show packed samples, with the tokens that are trained on marked",
    "stats": "count rows, tokens and dropped documents, and show how long documents are",
    "clean": "remove prepared data that has not been used for a while",
}


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp data") -> int:
    """Run one of the three commands; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _main(arguments, prog))


def _main(arguments: list[str], prog: str) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:8} {summary}" for name, summary in COMMANDS.items())
        print(f"usage: {prog} COMMAND [arguments]\n\ncommands:\n{lines}", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else ConfigError.exit_code
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigError(f"unknown command data {name}{nearest(name, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    return {"preview": _preview, "stats": _stats, "clean": _clean}[name](rest, f"{prog} {name}")


def preview_parser(prog: str) -> ConfigParser:
    parser = ConfigParser(prog, "Show packed samples as they are trained on, in the order of the run.")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="how many (default: 2)")
    parser.add_argument("--eval", metavar="NAME", help="show this evaluation dataset (default: the training data)")
    add_trust(parser, code=RUNS_CODE)
    return parser


def _preview(arguments: Sequence[str], prog: str) -> int:
    parser = preview_parser(prog)
    found, config = parse_for_data(parser, arguments)
    parser.check_least(found, "--samples")
    from raytune_fsdp.run.prepare import open_as_run

    with show_progress() as progress:
        tokenizer, train, evals = open_as_run(config, progress)
    if found.eval is not None and found.eval not in evals:
        known = ", ".join(evals) or "none"
        parser.error(
            f"--eval {found.eval}: no evaluation dataset has this name{nearest(found.eval, evals)}; all: {known}"
        )
    windows = train if found.eval is None else evals[found.eval]
    from raytune_fsdp.base.batch import Cursor
    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.record.report.data import preview

    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    samples = Stream(windows, seed=config.run.seed).samples(Cursor())
    for number, each in enumerate(islice(samples, found.samples), start=1):
        lines = preview(
            each.sample, tokenizer, windows.names, title=f"sample {number}", colours=colours, columns=windows.columns,
            scoring=windows.scoring,
        )  # fmt: skip
        for line in lines:
            print(line)
    return 0


def stats_parser(prog: str) -> ConfigParser:
    parser = ConfigParser(prog, "Count the data: tokenize and pack all windows, and keep them for the run.")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the lengths of the documents into this file")
    add_trust(parser, code=RUNS_CODE)
    return parser


def _stats(arguments: Sequence[str], prog: str) -> int:
    parser = stats_parser(prog)
    found, config = parse_for_data(parser, arguments)
    from raytune_fsdp.data.census import census, classes_of, groups_of_steps
    from raytune_fsdp.data.duplicates import left_out_of
    from raytune_fsdp.record.report.curves import NOT_INSTALLED, can_draw
    from raytune_fsdp.record.report.data import plot_lengths, stats
    from raytune_fsdp.run.prepare import open_as_run

    if found.png is not None and not can_draw():
        raise ConfigError(f"--png {found.png}: {NOT_INSTALLED}")

    with show_progress() as progress:
        _, train, evals = open_as_run(config, progress)
        every: dict[str, Windows] = {"train": train, **{f"eval {name}": windows for name, windows in evals.items()}}
        censuses = {
            # An evaluation is always one epoch: it sees every row once.
            what: census(windows, (config.train.epochs or 1.0) if windows is train else 1.0, progress=progress)
            for what, windows in every.items()
        }
    for what, counted in censuses.items():
        windows = every[what]
        of_steps = groups_of_steps(windows, config.run.seed, config.train.global_batch) if windows is train else None
        for line in stats(counted, title=what, groups=of_steps, kind=windows.kind):
            say(line)
        if classes := classes_of(windows):
            say("classes: " + ", ".join(f"{name} {many:,}" for name, many in classes.items()))
        print()
    for name, (before, after) in left_out_of(train.names, train.sources).items():
        print(f"left out of {name}: {before - after:,} of {before:,} rows, as equal ones are measured or trained on")
    if found.png is not None:
        plot_lengths(censuses, found.png)
        say(f"lengths  {found.png}")
    return 0


def clean_parser(prog: str) -> Parser:
    parser = Parser(
        prog,
        "Remove prepared rows and windows, and what other models have said of them, from a cache; all is made again "
        "when needed, which for a teacher may take hours.",
    )
    parser.add_argument("cache", type=Path, help="the cache: data.cache.path, or `cache` in run.storage")
    parser.add_argument(
        "--unused-days", type=float, default=7.0, metavar="N", help="keep data used in the last N days (default: 7)"
    )
    parser.add_argument("--keep-gb", type=float, default=0.0, metavar="N", help="stop when N GB are left (default: 0)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def _clean(arguments: Sequence[str], prog: str) -> int:
    parser = clean_parser(prog)
    found = parser.parse(arguments)
    for flag, value in (("--unused-days", found.unused_days), ("--keep-gb", found.keep_gb)):
        if not 0 <= value < math.inf:
            parser.error(f"{flag} {value:g} must be a number >= 0")
    from raytune_fsdp.data.cache import entries, remove

    if not found.cache.is_dir():
        raise ConfigError(
            f"{found.cache} is not a directory; give the cache of a run: data.cache.path, or run.storage/cache"
        )
    before = sum(entry.bytes for entry in entries(found.cache))
    clean = partial(remove, found.cache, keep_bytes=int(found.keep_gb * 1e9), unused_for=found.unused_days * 86400)
    wanted = clean(dry_run=True)
    removed = wanted if found.dry_run else clean()
    freed = sum(entry.bytes for entry in removed)
    verb = "would remove" if found.dry_run else "removed"
    line = f"{verb} {len(removed):,} prepared files and windows, {_size(freed)}; left {_size(before - freed)}"
    if stay := [each.path for each in wanted if not found.dry_run and each.path.exists()]:
        line += f"; {len(stay):,} could not be removed, such as {stay[0]}: another user may have to do it"
    print(line)
    return 0


PARSERS: Mapping[str, Callable[[str], Parser]] = {
    "preview": preview_parser, "stats": stats_parser, "clean": clean_parser,
}  # fmt: skip
"""The parsers of the three commands, by their names; each takes what the command is called."""


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


if __name__ == "__main__":
    raise SystemExit(main())
