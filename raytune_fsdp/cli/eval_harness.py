"""`raytune-fsdp eval MODEL --lm-eval TASKS`: measure a model by tasks of lm-evaluation-harness."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.cli.common import ConfigParser

if TYPE_CHECKING:
    from raytune_fsdp.run.evaluation.harness import HarnessTasks

FLAG = "--lm-eval"


def add_flags(parser: ConfigParser) -> None:
    parser.add_argument(
        FLAG, metavar="TASKS",
        help="in the place of the config's data, tasks of EleutherAI's lm-evaluation-harness, as that tool measures "
        "them: arc_easy,mmlu (pip install 'raytune-fsdp[lm-eval]')",
    )  # fmt: skip
    parser.add_argument(
        "--lm-eval-tasks", type=Path, metavar="DIR",
        help="with --lm-eval: a directory with tasks of your own; they can run code, so --trust-remote-code must be "
        "given, too",
    )  # fmt: skip
    parser.add_argument(
        "--lm-eval-shots", type=int, metavar="N", help="with --lm-eval: solved examples before each question"
    )
    parser.add_argument(
        "--lm-eval-limit", type=int, metavar="N", help="with --lm-eval: only the first N rows of each task"
    )
    parser.add_argument("--lm-eval-chat", action="store_true", help="with --lm-eval: ask in the model's chat template")
    parser.add_argument(
        "--lm-eval-batch", type=int, default=1, metavar="N",
        help="with --lm-eval: prompts at once (default: 1, which pads nothing)",
    )  # fmt: skip


def tasks_of(parser: ConfigParser, found: Namespace, rest: Sequence[str]) -> HarnessTasks:
    """Return the tasks that the flags describe. Refuses what says nothing to them."""
    for flag, given in (("--config", found.config is not None), ("--workers", found.workers != 1)):
        if given:
            parser.error(f"{FLAG} measures its own tasks, in one process: leave {flag} out")
    if rest:
        parser.error(f"{FLAG} measures its own tasks, and takes nothing from a config: leave {rest[0]} out")
    names = tuple(dict.fromkeys(name.strip() for name in found.lm_eval.split(",") if name.strip()))
    if not names:
        parser.error(f"{FLAG} needs names of tasks: {FLAG} arc_easy,mmlu")
    for flag, least in (("--lm-eval-shots", 0), ("--lm-eval-limit", 1), ("--lm-eval-batch", 1)):
        parser.check_least(found, flag, least)
    directory = found.lm_eval_tasks
    if directory is not None and not directory.is_dir():
        parser.error(f"--lm-eval-tasks {directory} is not a directory: name one with the tasks' YAML files")
    if directory is not None and not found.trust_remote_code:
        parser.error(
            f"--lm-eval-tasks {directory}: such tasks can run code (functions, templates, metrics): look at them, then "
            "add --trust-remote-code"
        )
    from raytune_fsdp.run.evaluation.harness import HarnessTasks

    return HarnessTasks(
        names=names, directory=directory, shots=found.lm_eval_shots, limit=found.lm_eval_limit,
        chat=found.lm_eval_chat, batch=found.lm_eval_batch,
    )  # fmt: skip


def check_without(parser: ConfigParser, found: Namespace) -> None:
    """Refuse flags of tasks without tasks."""
    given = {
        "--lm-eval-tasks": found.lm_eval_tasks is not None, "--lm-eval-shots": found.lm_eval_shots is not None,
        "--lm-eval-limit": found.lm_eval_limit is not None, "--lm-eval-chat": found.lm_eval_chat,
        "--lm-eval-batch": found.lm_eval_batch != 1,
    }  # fmt: skip
    parser.refuse_given(given, f"goes with {FLAG}: name the tasks")


def measure(found: Namespace, tasks: HarnessTasks) -> dict[str, float]:
    """Return the values of the tasks. Their data is opened before the model is loaded."""
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    from raytune_fsdp.checkpoint.model_files import describe_for_inference, load_for_inference
    from raytune_fsdp.launch.worker import choose_device
    from raytune_fsdp.run.places import check_places

    check_places(found.model, trusted=found.trust_places, base=found.base)
    trust = found.trust_remote_code
    describe_for_inference(
        found.model, trust_remote_code=trust, base=found.base
    )  # a model that is not there is said now
    manager = tasks.opened()
    model, tokenizer = load_for_inference(
        found.model, choose_device("auto", 1), trust_remote_code=trust, base=found.base
    )
    with redirect_stdout(sys.stderr):  # what tasks and libraries print; programs read ours
        return tasks.measure(model, tokenizer, manager)
