"""Shared by all commands: arguments that fail in one line, config files with overrides, exit codes.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import select
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from raytune_fsdp.base.errors import ConfigError, Interrupted, RaytuneError, UserError
from raytune_fsdp.base.hushed import hush
from raytune_fsdp.base.leaving import crashing, leave
from raytune_fsdp.base.redaction import redact_shapes
from raytune_fsdp.base.untrusted import Printable, printable
from raytune_fsdp.launch.torchrun import is_rank0
from raytune_fsdp.plan.run_dir import CONFIG_FILE, EVENTS_FILE, check_links

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from raytune_fsdp.config import FinetuneConfig

P = TypeVar("P", bound=argparse.ArgumentParser)

BASE = "where the base of a run's adapters is now; default: where the run found it"
TRUST = "the model may bring Python code of its own; only for models whose code you have read"

RUNS_CODE = "the run's config may name Python code (of its model, or to read rows); only for code you have read"


def add_trust(parser: argparse.ArgumentParser, *, base: str | None = None, code: str | None = None) -> None:
    """Add the flags of commands that go where a run's files lead: --trust-places always, others by their help."""
    if base is not None:
        parser.add_argument("--base", metavar="PATH", help=base)
    if code is not None:
        parser.add_argument("--trust-remote-code", action="store_true", help=code)
    parser.add_argument(
        "--trust-places",
        action="store_true",
        help="go where the run's files lead outside of it (data, caches, checkpoints, bases, URLs), although you have "
        "not trained it; only for places that you have looked at",
    )


def parse_for_data(parser: ConfigParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, FinetuneConfig]:
    """Parse for a command that reads data. A run's own config may be a stranger's: check its code and its places."""
    found, config = parser.parse_with_config(arguments)
    return found, checked_for_data(found, config, arguments)


def checked_for_data(found: argparse.Namespace, config: FinetuneConfig, arguments: Sequence[str]) -> FinetuneConfig:
    """Return the config by which data is read. If --config is a run's own file, check its code and its places."""
    run = check_own_code(found, config)
    if run is None:
        return config
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.tools.audit.past import past_place, placed

    check_places(run, trusted=found.trust_places, config=config, base="")
    moved = not any(word.startswith(("--run.storage", "--run.name")) for word in arguments)
    return placed(config, past_place(run)) if moved else config


def check_own_code(found: argparse.Namespace, config: FinetuneConfig) -> Path | None:
    """If --config is a run's own file, check the code that it names, and return the run."""
    file = Path(found.config or "")
    if file.name != CONFIG_FILE or not (file.parent / EVENTS_FILE).is_file():
        return None
    from raytune_fsdp.tools.audit.past import check_code

    check_code(config, trusted=found.trust_remote_code)
    return file.parent


def say(text: object) -> None:
    """Print a line that may hold a stranger's names: of directories, files and datasets."""
    print(printable(str(text)), flush=True)


def say_lines(text: str) -> None:
    """Print several lines that may hold a stranger's names, in which line ends were replaced before."""
    for line in text.split("\n"):
        say(line)


def exit_code(work: Callable[[], int]) -> int:
    """Do the work; errors meant for users become one line per problem on stderr and the exit code they carry."""
    code = _code_of(work)
    if crashing:  # Python's own way out would end this process by a signal, and nobody would see the code
        leave(code)
    return code


def _code_of(work: Callable[[], int]) -> int:
    try:
        hush()
        if logging.lastResort is not None:  # prints warnings if nobody has set up logging, as in most commands
            logging.lastResort.setFormatter(Printable())
        return work()
    except RaytuneError as error:
        # Under torchrun every rank finds the same mistake of the user; an error in training may be one rank's alone.
        speaks = is_rank0() or not isinstance(error, UserError)
        # One line for each problem of a user's error, as a stranger's names may have line ends; all lines of an error
        # in training, which may be the words of many ranks.
        lines = (str(error) or type(error).__name__).splitlines()
        if isinstance(error, UserError) and any(error.args):
            lines = [str(problem) for problem in error.args]
        for line in lines if speaks else ():
            # Libraries quote whole addresses in their errors, secrets included; and we quote strangers' texts.
            print("error:", printable(redact_shapes(line)), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if _output_is_read():  # another pipe broke: that of a process that has died, or a socket
            raise
        # The reader of our output is gone (`| head`). Python flushes stdout at exit, and would fail there once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return Interrupted.exit_code


def main_of(name: str, parser_of: Callable[[str], P], work: Callable[[P, list[str]], int]) -> Callable[..., int]:
    """Return the `main(argv, prog)` of a command, which does this work and returns the exit code.

    Without arguments it takes those of the process.
    """

    def main(argv: Sequence[str] | None = None, prog: str = f"raytune-fsdp {name}") -> int:
        return exit_code(lambda: work(parser_of(prog), list(sys.argv[1:] if argv is None else argv)))

    return main


def _output_is_read() -> bool:
    """Return whether somebody still reads what this process prints."""
    try:
        ready = select.poll()
        ready.register(sys.stdout.fileno(), 0)  # errors are always reported, and a closed other end is one
        return not ready.poll(0)
    except (OSError, ValueError, AttributeError):
        return True


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; nearest: ...`, or an empty text if no known word is near."""
    found = get_close_matches(word, list(known), n=1)
    return f"; nearest: {found[0]}" if found else ""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, and without a page of usage before an error."""

    def __init__(self, prog: str, description: str, *, add_help: bool = True) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=add_help)

    def error(self, message: str) -> NoReturn:
        if wrong := re.fullmatch(r"argument (?:\S+/)?(\S+): invalid (int|float) value: (.*)", message):
            message = f"{wrong[1]} {wrong[3]}: must be {'a whole number' if wrong[2] == 'int' else 'a number'}"
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            needed = " ".join(action.dest for action in self._actions if not action.option_strings)
            message = f"missing: {missing[1].upper()}; usage: {self.prog} [-h] {needed}"
        if other := re.fullmatch(r"argument (?:\S+/)?(\S+): invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = re.findall(r"'?([^', ]+)'?", other[3])
            what = (
                f"{other[1]} {other[2]}" if other[1].startswith("-") else f"unknown {self.prog.split()[-1]} {other[2]}"
            )
            message = f"{what}{nearest(other[2], known)}; there are {', '.join(known)}"
        raise ConfigError(f"{message} ({self.prog} --help)")

    def check_least(self, found: argparse.Namespace, flag: str, least: int = 1) -> None:
        """Refuse a number that is given by this flag and is less than the least."""
        value = getattr(found, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value < least:
            self.error(f"{flag} {value} must be at least {least}")

    def refuse_given(self, flags: Mapping[str, bool], why: str) -> None:
        """Refuse the first of these flags that is given. `why`: what the error says after its name."""
        if given := [flag for flag, is_given in flags.items() if is_given]:
            self.error(f"{given[0]} {why}")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse arguments of a command that takes no overrides."""
        found, unknown = self.parse_known_args(arguments)
        for word in unknown:
            flag = word.partition("=")[0]
            self.error(f"unknown argument {flag}{nearest(flag, self.flags())}")
        return found


def by_flag(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the arguments with what belongs together, `--a.b=1` or `--a.b 1`, and the name of each flag."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        if not word.startswith("--") and found and len(found[-1][1]) == 1 and "=" not in found[-1][1][0]:
            found[-1][1].append(word)
        else:
            found.append((word.partition("=")[0], [word]))
    return found


def value_in(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value that the arguments give a flag, the last one if there are several; None: they give none."""
    given = [words for name, words in by_flag(arguments) if name == flag]
    return None if not given else " ".join(given[-1]).removeprefix(flag)[1:]


class ModelParser(Parser):
    """A parser of a command that asks a model."""

    def __init__(self, prog: str, description: str, *, max_new_tokens: int) -> None:
        super().__init__(prog, description)
        self.add_argument("model", type=Path, help="run directory, checkpoint, export, or Hugging Face model directory")
        self.add_argument(
            "--max-new-tokens", type=int, default=max_new_tokens, metavar="N",
            help=f"maximum length of an answer (default: {max_new_tokens})",
        )  # fmt: skip
        self.add_argument("--temperature", type=float, default=0.0, help="0: the most likely tokens (default)")
        self.add_argument(
            "--chat-template-kwargs", metavar="JSON",
            help="variables for the chat template, such as '{\"enable_thinking\": false}'; default: those that the run "
            "was trained with, which its exports keep",
        )  # fmt: skip
        add_trust(self, base=BASE, code=TRUST)

    def parse_and_load(
        self, arguments: Sequence[str]
    ) -> tuple[argparse.Namespace, PreTrainedModel, PreTrainedTokenizerBase, torch.device]:
        """Return the arguments, and the model that they name, on this machine's device."""
        found = self.parse(arguments)
        self.check_least(found, "--max-new-tokens")
        variables = self._variables(found.chat_template_kwargs)
        from raytune_fsdp.launch.quiet import quiet

        quiet()
        import torch

        from raytune_fsdp.checkpoint.model_files import load_for_inference
        from raytune_fsdp.data.rows.templates import TemplateChoice
        from raytune_fsdp.run.places import check_places

        check_places(found.model, trusted=found.trust_places, base=found.base)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = load_for_inference(
            found.model, device, trust_remote_code=found.trust_remote_code, base=found.base
        )
        if variables is not None:
            replace(TemplateChoice.kept_in(tokenizer), variables=variables).keep_in(tokenizer)
        return found, model, tokenizer, device

    def _variables(self, text: str | None) -> dict[str, Any] | None:
        """Return the variables of --chat-template-kwargs; None: it is not given."""
        if text is None:
            return None
        from pydantic import ValidationError

        from raytune_fsdp.config.sections.data import PromptSettings

        try:
            return PromptSettings.model_validate({"chat_template_kwargs": json.loads(text)}).chat_template_kwargs
        except ValidationError as error:
            why = error.errors()[0]["msg"]
        except ValueError as error:
            why = str(error)
        self.error(f"--chat-template-kwargs {text!r} must be a map in JSON, such as '{{\"name\": false}}': {why}")


class ConfigParser(Parser):
    """A parser that knows `--config` and leaves `--section.field value` to the config, which its help lists, too."""

    def __init__(self, prog: str, description: str, default_config: str | Path | None = None) -> None:
        more = "Every field of the config is a flag: --section.field value."
        super().__init__(prog, f"{description} {more}", add_help=False)
        self.default_config = default_config
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", metavar="SECTION",
            help="show this page, or the fields of a section of the config; all: those of every section",
        )  # fmt: skip
        default = f" (default: {Path(default_config).name})" if default_config is not None else ""
        self.add_argument("--config", metavar="FILE", help=f"YAML file with the config, or a recipe's name{default}")

    def first_word(self, arguments: Sequence[str], needed: str) -> str | None:
        """Return the first word, which names what a command is about; None if help is asked for.

        The words in `needed` must come first: otherwise the value of a field before them could be taken for one.
        """
        if {"-h", "--help"} & {word.partition("=")[0] for word in arguments}:
            return None
        words = needed.split()
        if len(arguments) < len(words) or arguments[0].startswith("-"):
            what = " and ".join(f"the {word.lower()}" for word in words)
            self.error(f"{what} come{'s' * (len(words) == 1)} first: {self.prog} {needed} [arguments]")
        return arguments[0]

    def parse_with_config(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, FinetuneConfig]:
        """Return the command's own arguments, and the config: read from its file, with all other arguments applied."""
        from raytune_fsdp.config.load import ROOT, load_config

        found, overrides = self.parse_known_args(arguments)
        # Many other programs take `train run.yaml`.
        if overrides and overrides[0].endswith((".yaml", ".yml")) and not overrides[0].startswith("--"):
            self.error(f"unexpected argument {overrides[0]}; a config file is given with --config {overrides[0]}")
        for word in overrides:
            flag = word.partition("=")[0]
            # A mistyped flag of the command would be reported as an unknown section of the config. A word with a dot
            # can only be a field.
            known = [*self.flags(), *(f"--{section}" for section in ROOT.fields())]
            close = get_close_matches(flag, known, n=1)
            if "." not in flag and flag not in known and close and close[0] in self.flags():
                self.error(f"unknown argument {flag}; nearest: {close[0]}")
        return found, load_config(found.config or self.default_config, overrides)

    def format_help(self) -> str:
        from raytune_fsdp.config.load import ROOT
        from raytune_fsdp.config.schema import sections_in_words

        usage, indent = self.format_usage(), " " * len(f"usage: {self.prog} ")
        options = super().format_help().replace(usage, f"{usage}{indent}[--section.field VALUE ...]\n", 1)
        return f"{options}\nsections of the config (--help SECTION):\n{sections_in_words(ROOT, help_width())}"

    def help_of(self, section: str) -> str:
        """Return the fields of a section (`optim`, `optim.schedule`); of all, after the page, for `all`."""
        from raytune_fsdp.config.load import ROOT
        from raytune_fsdp.config.schema import describe, help_text

        if section == "all":
            return f"{self.format_help()}\n{help_text(ROOT, help_width())}"
        known = {entry.path for entry in describe(ROOT)}
        known |= {path.rpartition(".")[0] for path in known}
        path = re.sub(r"\.\d+(?=\.|$)", ".N", section)
        if path not in known:
            if any(not action.option_strings for action in self._actions):  # what the command is about
                return self.format_help()
            self.error(f"--help {section}: no such section or field of the config{nearest(section, known)}")
        return help_text(ROOT, help_width(), below=path)


def help_width() -> int:
    # Two columns less than the terminal, as in argparse's part of the help, which is above ours.
    return max(40, min(shutil.get_terminal_size().columns, 120) - 2)


class _Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> NoReturn:
        assert isinstance(parser, ConfigParser)
        print(parser.help_of(values) if values else parser.format_help(), end="")
        parser.exit()


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet. Raises ConfigError if it does, or cannot be written."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from None


def config_of_run(run: Path) -> Path:
    """Return the path of a run directory's config."""
    check_links(run)
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {CONFIG_FILE}; give <run.storage>/<run.name>")
    return run / CONFIG_FILE
