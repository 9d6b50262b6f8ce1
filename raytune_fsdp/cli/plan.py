"""`raytune-fsdp plan`: show what a config amounts to at a world size, and on which GPUs it fits. A laptop will do.

Imports torch only for GPUs (`plan_on_gpus.py`) and `--units`.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.redaction import redact_text
from raytune_fsdp.cli import plan_as_page, plan_calibrate, plan_failures
from raytune_fsdp.cli.common import (
    RUNS_CODE,
    ConfigParser,
    add_trust,
    check_own_code,
    checked_for_data,
    main_of,
    say_lines,
)
from raytune_fsdp.cli.plan_on_gpus import add_flags, check, gpu_of, plan_on_gpus
from raytune_fsdp.cli.plan_rows import SECONDS, CountedRows, count_rows
from raytune_fsdp.plan.cadence import cadence_in_words

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.plan.plan import Plan


def parser_of(prog: str) -> ConfigParser:
    parser = ConfigParser(prog, "Show what a config amounts to: batches, steps, learning rate, sharding.")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks to plan for (default: cluster.workers, or 1)"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N",
        help="packed samples of an epoch, for a length in train.epochs; without it, the rows are counted for up to "
        f"{SECONDS:g} seconds",
    )  # fmt: skip
    parser.add_argument(
        "--units", action="store_true", help="also which weights are gathered together; needs torch and a model config"
    )
    add_flags(parser)
    plan_failures.add_flags(parser)
    plan_as_page.add_flags(parser)
    plan_calibrate.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser, code=RUNS_CODE)
    return parser


def _plan(parser: ConfigParser, arguments: Sequence[str]) -> int:
    found, overrides = parser.parse_known_args(arguments)
    for flag in ("--world-size", "--samples"):
        parser.check_least(found, flag)
    if found.calibrate is not None:
        return plan_calibrate.calibrate_here(parser, found, overrides)
    found, config = parser.parse_with_config(arguments)
    check_own_code(found, config)
    from raytune_fsdp.plan.counts import Census
    from raytune_fsdp.plan.plan import layout_of, resolve, sizes_of
    from raytune_fsdp.plan.run_dir import RunDir

    world = found.world_size or sizes_of(config)[-1]
    check(parser, found)
    plan_failures.check(parser, found)
    plan_as_page.check(parser, found)
    layout_of(config, world)  # refused before anything is counted
    counted, census, counts_all = None, None, ""
    if found.samples is not None:
        census = Census(seq_len=config.data.seq_len, epochs=(found.samples,))
    elif config.train.epochs is not None:
        words = ["--config", found.config, *overrides] if found.config is not None else overrides
        trusted = [f"--{name.replace('_', '-')}" for name in ("trust_remote_code", "trust_places") if vars(found)[name]]
        counts_all = redact_text(shlex.join(["raytune-fsdp", "data", "stats", *words, *trusted]))
        from raytune_fsdp.cli.progress import show_progress

        placed = checked_for_data(found, config, arguments)
        with show_progress(quiet=found.json) as progress:
            counted = count_rows(placed, counts_all, progress)
        census = counted.census
    plan = resolve(config, world, census)
    if found.serve:
        return plan_as_page.serve_plan(found, config, census, world)
    place = RunDir.of(config)
    units = _units(found, config, plan) if found.units else {}
    on_gpus = plan_on_gpus(parser, found, config, plan)
    failures = plan_failures.failures_of(found, world)
    if found.json:
        said = {"failures": plan_failures.as_data(config, failures)}
        data = {**plan.to_dict(), "layout": plan.spread(), **said, **units, **(on_gpus[1] if on_gpus else {})}
        if counted is not None:
            data |= counted.as_data(lambda each: resolve(config, world, each), data)
        print(json.dumps(data, indent=2))
        return 0
    say_lines(plan_in_words(config, plan, place.path, counted, counts_all))
    say_lines(plan_failures.in_words(config, failures))
    if on_gpus:
        print(f"\n{on_gpus[0]}")
    if found.units:
        from raytune_fsdp.record.console import event_in_words
        from raytune_fsdp.record.names import SHARDED

        print(f"{'units':10} {event_in_words(SHARDED, units['sharding']) if units['sharding'] else 'not sharded'}")
    return 0


def _units(found: Namespace, config: FinetuneConfig, plan: Plan) -> dict[str, Any]:
    """Describe what is gathered together, on the GPUs that are asked for, or else on devices as this machine has."""
    import torch

    from raytune_fsdp.predict.subject import ModelSpec, with_torch_alone
    from raytune_fsdp.predict.trace.trace import sharding_of
    from raytune_fsdp.step.parallel import memory_of

    kind = "cuda" if found.gpu or torch.cuda.is_available() else "cpu"
    memory = int(gpu_of(found.gpu).memory) if found.gpu else memory_of(torch.device(kind))
    spec = ModelSpec.of(config, found.architecture)
    # What is gathered does not depend on the attention, whose package may be on other machines only.
    return {"sharding": sharding_of(with_torch_alone(config), plan, spec, kind, memory)}


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def plan_in_words(
    config: FinetuneConfig, plan: Plan, run_dir: Path, counted: CountedRows | None = None, counts_all: str = ""
) -> str:
    """Return the plan as lines of text. `counts_all`: the command that counts all rows, where only some were."""
    layout, division, data, parallel = plan.layout, plan.division, config.data, config.parallel
    tokens = division.global_batch * data.seq_len
    fillers = f", and {division.fillers} without data that keep the ranks aligned" if division.fillers else ""
    copies = f"{layout.replicas} copies of the model" if layout.replicas > 1 else "one copy of the model"
    if layout.together > 1:
        shared = "each sample" if layout.tensor == 1 else "each sample and each layer"
        copies = f"{layout.data_ranks} groups that share {shared}, {copies}"
    over = layout.shard_size * layout.tensor
    rounds = f"{division.full_rounds} a step"
    by_clock = ["by the clock (checkpoint.every)"] if config.checkpoint.by_clock else []
    groups = {"preference": "pairs", "score": "documents"}.get(config.train.objective.rows or "", "answers")
    about = "about " if counted is not None and counted.estimated else ""
    saved = [*([cadence_in_words(plan.save_every)] if plan.saves > 1 or not by_clock else []), *by_clock]
    rows = {
        "run": str(run_dir),
        "world": f"{_ranks(layout.world)}: {copies}, each over {_ranks(over)} ({parallel.strategy})",
        "precision": parallel.precision,
        "batch": f"{division.global_batch} packed samples, up to {tokens:,} tokens a step",
        **({} if counted is None else {"data": counted.in_words(counts_all)}),
        **({} if counted is None or counted.groups is None else {groups: f"{about}{counted.groups.words}"}),
        "rounds": f"{rounds}: {division.micro_batches} micro-batches of {division.micro_batch} over all ranks{fillers}",
        "steps": f"{about}{plan.steps:,}, up to {plan.steps * tokens:,} tokens",
        "lr": f"{config.optim.lr:g}, {config.optim.schedule.type} over {plan.schedule_steps:,} steps, "
        f"{plan.warmup_steps} of warmup",
        **_reference(config),
        "saved": f"{', '.join(saved)}, and at the end",
        "evaluated": f"{cadence_in_words(plan.eval_every)}, and at the end"
        if data.eval or config.eval.tasks or config.eval.prompts
        else "never",
    }
    return "\n".join(f"{name:10} {value}" for name, value in rows.items())


def _reference(config: FinetuneConfig) -> dict[str, str]:
    """Return the row about what the run compares with or learns from, if it does."""
    if config.teacher is not None:
        return {
            "teacher": f"{config.teacher.model}, its {config.teacher.top_k} likeliest tokens, asked once about every "
            "token that is trained on, before training"
        }
    if not config.train.objective.compares:
        return {}
    which = "what the run starts from" if config.reference.model is None else config.reference.model
    kept = "asked once about every row, before training, and kept beside the data"
    return {"reference": f"{which}, {kept if config.reference.when == 'before' else 'asked in every step'}"}


main = main_of("plan", parser_of, _plan)

if __name__ == "__main__":
    raise SystemExit(main())
