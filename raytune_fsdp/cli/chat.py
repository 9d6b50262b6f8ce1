"""`raytune-fsdp chat`: talk with a trained model, from a run, a checkpoint, an export or any Hugging Face directory.

What it is given is rendered as in training, by the chat template: the whole conversation, anew for every answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.cli.common import BASE, TRUST, Parser, exit_code
from raytune_fsdp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from raytune_fsdp.answers import Talk

_COMMANDS = "/reset forgets what was said, /system TEXT sets the system prompt, /exit or Ctrl-D ends"


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp chat") -> int:
    """Talk until the input ends; returns the exit code."""
    parser = Parser(
        prog,
        f"Talk with a trained model. {_COMMANDS}; Ctrl-C ends an answer. Where the input is not a terminal, each line "
        "of it is a message.",
    )
    parser.add_argument("model", type=Path, help="run directory, checkpoint, export, or Hugging Face model directory")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="maximum length of an answer (default: 512)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely tokens (default)")
    parser.add_argument("--base", metavar="PATH", help=BASE)
    parser.add_argument("--trust-remote-code", action="store_true", help=TRUST)
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _chat(parser, arguments))


def _chat(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    if found.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {found.max_new_tokens} must be at least 1")
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    import torch

    from raytune_fsdp.answers import Talk
    from raytune_fsdp.checkpoint.model_files import load_for_inference

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_for_inference(
        found.model, device, trust_remote_code=found.trust_remote_code, base=found.base
    )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{found.model} has no chat template, so it was trained on no conversations: use `raytune-fsdp generate`, "
            "which continues a text"
        )
    talk = Talk(
        model, tokenizer, device, system=found.system, max_new_tokens=found.max_new_tokens,
        temperature=found.temperature,
    )  # fmt: skip
    if sys.stdin.isatty():
        print(f"({_COMMANDS})", file=sys.stderr)
    for line in _lines():
        if line == "/exit":
            break
        _obey(talk, line)
    return 0


def _obey(talk: Talk, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/reset":
        talk.forget()
    elif command == "/system":
        talk.system = rest.strip() or None
    elif command.startswith("/") and command[1:].isalpha():
        _note(f"there is no {command}; {_COMMANDS}")
    else:
        try:
            talk.ask(line, show=lambda text: print(text, end="", flush=True), note=_note)
        except DataError as error:  # of this message; the conversation is as it was before
            _note(str(error))
        print(flush=True)


def _note(text: str) -> None:
    print(f"({text})", file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    """What is said, line by line: with a sign and line editing in a terminal, as it comes from a pipe."""
    read: Callable[[], str] = _typed if sys.stdin.isatty() else _piped
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        if line:
            yield line


def _typed() -> str:
    import readline  # noqa: F401  # it gives input() its line editing

    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:  # as in a shell: the line is given up, not the program
            print()
        except EOFError:
            print()
            raise


def _piped() -> str:
    # Not by iterating, which reads ahead: the other end may wait for an answer before it asks again.
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


if __name__ == "__main__":
    sys.exit(main())
