"""`raytune-fsdp sweep`: train the trials of a sweep, and find the best."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from raytune_fsdp.cli.common import Parser, add_trust, help_width, main_of, say
from raytune_fsdp.cli.plan_on_gpus import PER_NODE, gpu_of

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.plan.counts import Census
    from raytune_fsdp.tune.schedulers.protocol import Scheduler
    from raytune_fsdp.tune.spec import SweepSpec
    from raytune_fsdp.tune.sweep import SweepResult

DEMO = "demo"


class _SweepParser(Parser):
    def format_help(self) -> str:
        from raytune_fsdp.config.schema import help_text
        from raytune_fsdp.tune.spec import SWEEP

        return f"{super().format_help()}\nfields of the sweep:\n\n{help_text(SWEEP, help_width())}"


def parser_of(prog: str) -> Parser:
    parser = _SweepParser(
        prog,
        "Train the trials of a sweep: runs of one base with other values, of which the worse ones stop early. The same "
        "command goes on with a sweep that was stopped or killed. Every field of the sweep is a flag.",
    )
    parser.add_argument("sweep", help="YAML file with the sweep; demo: a small one, of about a minute")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all trials, say what they would take, and start nothing"
    )
    parser.add_argument("--gpu", metavar="NAME", help="predict the hours on this device: A100-80GB, H100, ...")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="with --gpu: of each machine (default: 8)")
    parser.add_argument("--price", type=float, metavar="X", help="with --gpu: price of a GPU for an hour")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.add_argument("--force", action="store_true", help="start a trial also if it would not fit (train --force)")
    add_trust(parser)
    return parser


def _sweep(parser: Parser, arguments: Sequence[str]) -> int:
    found, overrides = parser.parse_known_args(arguments)
    _check(parser, found)
    from raytune_fsdp.tune.demo import demo
    from raytune_fsdp.tune.spec import load_sweep

    spec = load_sweep(demo() if found.sweep == DEMO else found.sweep, overrides)
    from raytune_fsdp.cli.progress import show_progress
    from raytune_fsdp.tune.sweep import checked, sweep

    if found.dry_run:
        _say_cost(found, spec, *checked(spec))
        return 0
    with show_progress():
        result = sweep(
            spec,
            before=lambda configs, scheduler: _say_cost(found, spec, configs, scheduler),
            so_far=lambda result: _say_result(spec, result),
            trust_places=found.trust_places,
            force=found.force,
        )
    _say_result(spec, result)
    return 0


def _check(parser: Parser, found: Namespace) -> None:
    if found.json and not found.dry_run:
        parser.error("--json goes with --dry-run")
    if found.gpu is None:
        given = {"--price": found.price is not None, "--gpus-per-node": found.gpus_per_node is not None}
        parser.refuse_given(given, "is for a prediction: name the device, too (--gpu A100-80GB)")
    if found.price is not None and not 0 <= found.price < math.inf:
        parser.error(f"--price {found.price} must be 0 or more")
    parser.check_least(found, "--gpus-per-node")
    if found.gpu is not None:
        gpu_of(found.gpu)  # an unknown one is refused before anything is read


def _say_cost(found: Namespace, spec: SweepSpec, configs: Sequence[FinetuneConfig], scheduler: Scheduler) -> None:
    """Say what the sweep takes, before anything is started: as far as that is known, unless nothing else is asked."""
    from raytune_fsdp.base.errors import ConfigError, in_one_line
    from raytune_fsdp.tune.cost import cost_of, in_words
    from raytune_fsdp.tune.place import SweepDir

    gpu = None if found.gpu is None else gpu_of(found.gpu)
    try:
        census = _census(configs)
    except ConfigError as error:
        if found.dry_run:
            raise
        say(f"what the sweep takes is not known yet: {in_one_line(error)}")
        return
    cost = cost_of(spec, scheduler, configs, census, gpu=gpu, per_node=found.gpus_per_node or PER_NODE)
    if found.json:
        print(json.dumps(asdict(cost)))
        return
    for line in in_words(spec, cost, found.price, begun=SweepDir.of(spec).log.exists()):
        say(line)


def _census(configs: Sequence[FinetuneConfig]) -> Census | None:
    """Count the rows of the first config whose length is given in epochs, for some seconds; None: there is none."""
    first = next((each for each in configs if each.train.epochs is not None), None)
    if first is None:
        return None
    from raytune_fsdp.cli.plan_rows import count_rows

    return count_rows(first, "raytune-fsdp data stats", instead="").census


def _say_result(spec: SweepSpec, result: SweepResult) -> None:
    from raytune_fsdp.tune.best import commands_of
    from raytune_fsdp.tune.board import SweepBoard
    from raytune_fsdp.tune.log import trials_in
    from raytune_fsdp.tune.sweep import measured_by
    from raytune_fsdp.tune.table import leaderboard, over_seeds

    board, log = SweepBoard(spec), result.log
    print()
    for line in board.table(leaderboard(log)):
        say(line)
    if spec.seeds > 1:
        print()
        for line in board.over_seeds(over_seeds(trials_in(log), measured_by(spec, log), result.best.variant)):
            say(line)
    go_on, again = commands_of(spec, result.best, log)
    print()
    say(f"best       {result.place.best}")
    say(f"continue   {go_on}")
    say(f"retrain    {again}")


main = main_of("sweep", parser_of, _sweep)

if __name__ == "__main__":
    raise SystemExit(main())
