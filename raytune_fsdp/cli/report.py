"""`raytune-fsdp report`: make the page about a run, or one that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.cli.common import Parser, main_of, say

COMPARISON = "comparison.html"


def parser_of(prog: str) -> Parser:
    parser = Parser(
        prog,
        "Make the page about a run from its directory, or one that compares several: their curves, and the first step "
        "at which each parts from the first run. The run may still be training. Opens from disk, and needs no network.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="run directory")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write it, replacing what is there (default: report/index.html of the run; of several "
        f"runs report/{COMPARISON} of the first)",
    )
    parser.add_argument("--png", action="store_true", help="also draw the loss as a picture, next to the page")
    return parser


def _report(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    from raytune_fsdp.cli.runs import states_of
    from raytune_fsdp.plan.run_dir import RunDir, curve_of, report_of
    from raytune_fsdp.record.report.curves import plot_runs
    from raytune_fsdp.record.report.page import page, write_page

    made = page(found.run, states_of([RunDir(path.absolute(), str(path)) for path in found.run]))
    place = report_of(found.run[0])
    alone = len(found.run) == 1
    out = found.out or (place if alone else place.with_name(COMPARISON))
    write_page(out, made, private=found.out is None)
    say(out)
    if found.png:
        png = curve_of(found.run[0]) if alone and found.out is None else out.with_suffix(".png")
        plot_runs(found.run, png)
        say(png)
    return 0


main = main_of("report", parser_of, _report)

if __name__ == "__main__":
    raise SystemExit(main())
