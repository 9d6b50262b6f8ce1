"""`raytune-fsdp chat`: talk with a trained model, from a run, a checkpoint, an export or any Hugging Face directory.

The input is rendered as in training, by the chat template: the whole conversation, again for every answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from raytune_fsdp.base.errors import ConfigError, DataError
from raytune_fsdp.base.untrusted import printable, without_controls
from raytune_fsdp.cli.common import ModelParser, main_of

_COMMANDS = "/reset forgets what was said, /system TEXT sets the system prompt, /exit or Ctrl-D ends"


def parser_of(prog: str) -> ModelParser:
    parser = ModelParser(
        prog,
        f"Talk with a trained model. {_COMMANDS}; Ctrl-C ends an answer. Where the input is not a terminal, each line "
        "of it is a message.",
        max_new_tokens=512,
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    return parser


def _chat(parser: ModelParser, arguments: Sequence[str]) -> int:
    found, model, tokenizer, device = parser.parse_and_load(arguments)
    from raytune_fsdp.run.evaluation.answers import Talk

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
        command, _, rest = line.partition(" ")
        if line == "/exit":
            break
        if command == "/reset":
            talk.forget()
        elif command == "/system":
            talk.system = rest.strip() or None
        elif command.startswith("/") and command[1:].isalpha():
            _note(f"there is no {command}; {_COMMANDS}")
        else:
            try:
                talk.ask(line, show=lambda text: print(without_controls(text), end="", flush=True), note=_note)
            except DataError as error:  # about this message; the conversation is as it was before
                _note(str(error))
            print(flush=True)
    return 0


def _note(text: str) -> None:
    print(printable(f"({text})"), file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    """Yield what the user says, line by line: with a prompt and line editing in a terminal, or from a pipe."""
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
    # Not by iterating over stdin, which reads ahead: the other end may wait for an answer before it asks again.
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


main = main_of("chat", parser_of, _chat)

if __name__ == "__main__":
    raise SystemExit(main())
