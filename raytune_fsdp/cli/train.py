"""`raytune-fsdp train`, and `python jobs/finetune.py`: train the model that a config describes."""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from raytune_fsdp.base.hushed import VERBOSE, speak
from raytune_fsdp.base.leaving import leave
from raytune_fsdp.cli.common import ConfigParser, add_trust, exit_code, say, say_lines
from raytune_fsdp.cli.progress import show_progress
from raytune_fsdp.config import FinetuneConfig

_WAITING = ("save-", "storage")
"""Prefixes of the names of threads that wait for storage."""


def main(
    argv: Sequence[str] | None = None, prog: str = "raytune-fsdp train", default_config: str | Path | None = None
) -> int:
    """Run a fine-tuning job; return the exit code. `default_config`: the file that is used without --config."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Make the parser inside, too: its imports take a second, and Ctrl-C may come then.
    return exit_code_of_training(lambda: _train(parser_of(prog, default_config), arguments))


def exit_code_of_training(work: Callable[[], int]) -> int:
    """Do the work of a command that trains; return the exit code, or leave if storage would keep the process."""
    before = set(threading.enumerate())
    code = exit_code(work)
    ours = set(threading.enumerate()) - before  # threads of this function's caller are not ours to end
    if code and any(thread.name.startswith(_WAITING) for thread in ours):
        # A thread waits for storage that does not answer, and a library would wait for that thread another minute.
        leave(code)
    return code


def parser_of(prog: str, default_config: str | Path | None = None) -> ConfigParser:
    parser = ConfigParser(prog, "Fine-tune a model.", default_config)
    add_training(parser)
    return parser


def add_training(parser: ConfigParser, *, code: str | None = None) -> None:
    """Add the arguments of a command that trains. `code`: see `add_trust`."""
    from raytune_fsdp.launch.finetune import WAIT_FOR_TRACKING

    parser.add_argument(
        "--wait-for-tracking",
        type=float,
        default=WAIT_FOR_TRACKING,
        metavar="SECONDS",
        help="how long to wait at the end for MLflow to take what it has missed; the same command sends what is left "
        f"(default: {WAIT_FOR_TRACKING:g})",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train two whole steps on the ranks that the run would have, print memory, speed and how long the run "
        "would take, and leave nothing behind",
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.add_argument(
        "--force",
        action="store_true",
        help="start also where weights and what is kept of them are more than a device has, or storage has no room for "
        "a checkpoint",
    )
    add_trust(parser, code=code)
    parser.add_argument("--verbose", action="store_true", help="show what libraries print and warn of, on every rank")


def _train(parser: ConfigParser, arguments: Sequence[str]) -> int:
    return train(parser, *parser.parse_with_config(arguments))


def train(parser: ConfigParser, found: argparse.Namespace, config: FinetuneConfig) -> int:
    """Train what a config describes, as the arguments of `add_training` say."""
    if not 0 <= found.wait_for_tracking < math.inf:
        parser.error(f"--wait-for-tracking {found.wait_for_tracking:g} must be 0 or more seconds")
    if found.json and not found.dry_run:
        parser.error("--json goes with --dry-run")
    if found.verbose:
        os.environ[VERBOSE] = "1"
        speak()
    if not (sys.stdout.isatty() and sys.stderr.isatty()) or "NO_COLOR" in os.environ:
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours `(raylet)` in files, too
    allowed = {"force": found.force, "trust_places": found.trust_places}
    if found.dry_run:
        return _dry_run(config, as_json=found.json, **allowed)
    # Only now that the config is valid: importing torch and transformers takes about three seconds (docs/results.md).
    from raytune_fsdp.launch.finetune import finetune
    from raytune_fsdp.launch.torchrun import is_rank0
    from raytune_fsdp.tools.doctor.checkup import look_around

    if is_rank0():
        look_around()
    with show_progress(quiet=not is_rank0()) as progress:
        result = finetune(config, progress, wait_for_tracking=found.wait_for_tracking, **allowed)
    if is_rank0():
        from raytune_fsdp.plan.run_dir import mlflow_database
        from raytune_fsdp.record.copies.mlflow import mlflow_installed
        from raytune_fsdp.record.report.summary import next_commands, summary

        mlflow, uri = config.tracking.mlflow, None
        if mlflow.enabled and mlflow_installed():
            uri = mlflow.uri or mlflow_database(result.run_dir.parent)[0]
        if not result.trained and result.ended_early:
            print(
                f"{config.run.name} is already complete: its evaluations have ended it after step {result.steps}. To "
                "train on, raise eval.early_stop.patience or leave eval.early_stop out"
            )
        elif not result.trained:
            print(
                f"{config.run.name} is already complete: choose another run.name, or ask for more steps, and with "
                "optim.schedule_steps for a learning rate until the last of them"
            )
        print()
        say_lines(
            summary(
                result.run_dir,
                checkpoint=result.checkpoint,
                export=result.export,
                pushed=result.pushed,
                registered=result.registered,
                curve=result.curve,
                report=result.report,
            )
        )
        print()
        say_lines(next_commands(result.run_dir, export=result.export, mlflow_uri=uri, mlflow_page=result.mlflow_page))
        if result.unsent is not None:
            print()
            say(result.unsent)
    return 0


def _dry_run(config: FinetuneConfig, *, as_json: bool, force: bool, trust_places: bool) -> int:
    began = time.time()  # imports count as part of the time to load
    from raytune_fsdp.launch.torchrun import is_rank0
    from raytune_fsdp.tools.dry_run.outcome import in_words, to_json
    from raytune_fsdp.tools.dry_run.two_steps import dry_run

    if as_json:  # nothing else may appear on stdout, not even what ranks print
        config = config.with_sections(tracking={"console": False})
    with (
        show_progress(quiet=as_json or not is_rank0()) as progress,
        redirect_stdout(sys.stderr) if as_json else nullcontext(),
    ):
        found = dry_run(config, progress, began=began, force=force, trust_places=trust_places)
    if found is not None:
        print(to_json(found) if as_json else "\n".join(("", *in_words(found))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
