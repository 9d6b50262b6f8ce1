"""`raytune-fsdp completion`: print a script with which a shell completes commands, flags, choices and config fields.

The script holds everything, read from the parsers and the config's sections, so that a completion starts no process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from raytune_fsdp.cli.common import ConfigParser, Parser, main_of
from raytune_fsdp.cli.completion_scripts import SCRIPTS, CommandWords, Flag


def parser_of(prog: str) -> Parser:
    parser = Parser(
        prog,
        "Print a script with which a shell completes commands, flags, choices and fields of the config. bash: source "
        "<(raytune-fsdp completion bash) in ~/.bashrc; zsh: the same with zsh in ~/.zshrc, after compinit; fish: "
        "raytune-fsdp completion fish > ~/.config/fish/completions/raytune-fsdp.fish",
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell that is to read it")
    return parser


def _completion(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    print(SCRIPTS[found.shell](list(commands()), list(fields())), end="")
    return 0


def commands() -> Iterator[CommandWords]:
    """Yield what may follow each command, as its parser has it."""
    from raytune_fsdp.cli.main import COMMANDS, PROGRAM

    for name, about in COMMANDS.items():
        module = import_module(f"raytune_fsdp.cli.{name}")
        if hasattr(module, "PARSERS"):
            for below, parser_below in module.PARSERS.items():
                yield _words((name, below), module.COMMANDS[below], parser_below(f"{PROGRAM} {name} {below}"))
        else:
            yield _words((name,), about, module.parser_of(f"{PROGRAM} {name}"))


def _words(name: tuple[str, ...], about: str, parser: Parser) -> CommandWords:
    first = next((action for action in parser._actions if not action.option_strings), None)
    return CommandWords(
        name=name,
        about=about,
        flags=tuple(flag for action in parser._actions for flag in _flags(action)),
        first=tuple(map(str, first.choices)) if first is not None and first.choices is not None else (),
        config=isinstance(parser, ConfigParser),
    )


def _flags(action: argparse.Action) -> Iterator[Flag]:
    from raytune_fsdp.config.load import ROOT, recipes

    for name in action.option_strings:
        if not name.startswith("--"):
            continue
        values = tuple(map(str, action.choices or ()))
        if action.metavar == "SECTION":
            values = (*ROOT.fields(), "all")
        if name == "--config":
            values = tuple(recipes())
        yield Flag(
            name=name,
            about=(action.help or "").replace("%%", "%"),
            takes=action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction),
            values=values,
            path=name == "--config" or action.type is Path,
        )


def fields() -> Iterator[Flag]:
    """Yield a flag for each field of the config. The first item stands for all items of a list."""
    from raytune_fsdp.config.load import ROOT
    from raytune_fsdp.config.schema import INDEX, describe, find_place

    known: set[str] = set()
    for entry in describe(ROOT):
        path = ["0" if part == INDEX else part for part in entry.path.split(".")]
        name = f"--{'.'.join(path)}"
        place = find_place(ROOT, tuple(path))
        if name in known or place is None:
            continue
        known.add(name)
        values = (*place.choices, *(("true", "false") if place.allows(bool) else ()))
        yield Flag(name=name, about=entry.doc, values=values, path=path[-1] in ("path", "storage", "tokenizer"))


main = main_of("completion", parser_of, _completion)

if __name__ == "__main__":
    raise SystemExit(main())
