"""`raytune-fsdp COMMAND`: find the command and hand it the rest of the line.

A command is a file `raytune_fsdp/cli/<name>.py` with `parser_of(prog)` and `main(argv, prog) -> int` (`main_of`), and a
line in COMMANDS. It is imported only when it is called, and imports anything heavy only when it works.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from raytune_fsdp import __version__
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.common import exit_code, nearest

PROGRAM = "raytune-fsdp"

COMMANDS = {
    "train": "fine-tune a model",
    "fork": "begin a run where another one was after a step, with changes",
    "sweep": "train many runs that differ in some values, and find the best",
    "data": "look at the data, count it, remove old prepared data",
    "plan": "show what a config amounts to, without starting anything",
    "doctor": "check machine, cluster, storage and services before a run",
    "generate": "ask a trained model",
    "chat": "talk with a trained model",
    "eval": "measure a model on evaluation data",
    "diff": "name the first step at which two runs part, and why",
    "step": "show which rows a step of a run trained on",
    "audit": "train a segment of a run again, and compare",
    "report": "make the page about a run, or one that compares several",
    "runs": "list the runs of a storage directory",
    "watch": "follow a run that another command trains",
    "logs": "show what the ranks of a run have printed",
    "checkpoint": "commit one now, list them, verify them, let torch read them",
    "stop": "let a run commit a checkpoint and end",
    "digest": "say in one line which numbers a checkpoint or a model holds, or compare two",
    "export": "write a checkpoint as a Hugging Face model directory",
    "average": "write the mean of a run's checkpoints as a Hugging Face model directory",
    "recipes": "list, show and copy the configs that come with the package",
    "convert": "turn another trainer's config into one of ours",
    "schema": "print the config's JSON schema, for editors",
    "completion": "print a script with which a shell completes these commands",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    return exit_code(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else ConfigError.exit_code
    name, *rest = arguments
    if name == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if name not in COMMANDS:
        what = "argument" if name.startswith("-") else "command"
        raise ConfigError(f"unknown {what} {name}{nearest(name, COMMANDS)}; `{PROGRAM} --help` lists the commands")
    return int(import_module(f"raytune_fsdp.cli.{name}").main(rest, prog=f"{PROGRAM} {name}"))


def usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND [arguments]\n\ncommands:\n{commands}\n\n"
        f"  {PROGRAM} COMMAND --help   the arguments of a command\n"
        f"  {PROGRAM} --version        the version\n"
    )


if __name__ == "__main__":
    sys.exit(main())
