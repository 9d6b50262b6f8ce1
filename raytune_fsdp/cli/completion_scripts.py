"""The scripts of `raytune-fsdp completion`: what may follow on the command line, in the words of each shell."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raytune_fsdp.cli.main import COMMANDS, PROGRAM

_LONGEST = 80
"""Characters of an explanation, where a shell shows them beside a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of a command, or one for a field of the config."""

    name: str
    about: str
    takes: bool = True
    """Whether a value follows."""
    values: tuple[str, ...] = ()
    """The values, where they are known."""
    path: bool = False
    """Whether the value may also be the path of a file or a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandWords:
    """What may follow a command."""

    name: tuple[str, ...]
    """The command, with the one below it if it has some: `data`, `preview`."""
    about: str
    flags: tuple[Flag, ...]
    first: tuple[str, ...]
    """The first word, where it is one of a few."""
    config: bool
    """Whether fields of the config are flags, too."""


def _below(commands: Sequence[CommandWords]) -> dict[str, list[str]]:
    """Return the commands that have commands below them, with these."""
    found: dict[str, list[str]] = {}
    for each in commands:
        if len(each.name) > 1:
            found.setdefault(each.name[0], []).append(each.name[1])
    return found


def _short(text: str) -> str:
    """Return the first sentence of an explanation, or its beginning, on one line."""
    sentence = re.split(r"(?<=[.;]) ", " ".join(text.split()))[0].rstrip(".;")
    return sentence if len(sentence) <= _LONGEST else f"{sentence[: _LONGEST - 1].rstrip()}…"


def _words(words: Sequence[str]) -> str:
    # Names of commands, flags and choices need no quotes in any shell.
    return " ".join(words)


_BASH = r"""# Completes {program} in bash. Load it with: source <({program} completion bash)
_raytune_fsdp() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}} words=""
    if [[ $current == = ]]; then # bash takes `--flag=value` apart
        current=""
    elif [[ $before == = ]]; then
        before=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    local fields="{fields}"
    local first=2
    case $command in
{below}
    esac
    if ((COMP_CWORD == 1)); then
        words="{commands}"
    elif ((COMP_CWORD < first)); then
        case $command in
{names_below}
        esac
    else
        local flags="" config="" start=""
        case $command in
{flags}
        esac
        case "$command $before" in
{values}
        *)
            if [[ $config && $before == --*.* ]]; then
                case $before in
{field_values}
                esac
            fi
            if [[ ! $words && $current == -* ]]; then
                words=$flags
                [[ $config ]] && words+=" $fields"
            elif [[ ! $words ]] && ((COMP_CWORD == first)); then
                words=$start
            fi
            ;;
        esac
    fi
    local IFS=$'\n' # not mapfile, which the bash 3.2 of macOS lacks
    COMPREPLY=($(IFS=$' \n' compgen -W "$words" -- "$current"))
}}
complete -o default -F _raytune_fsdp {program}
"""


def bash(commands: Sequence[CommandWords], fields: Sequence[Flag]) -> str:
    below = _below(commands)
    flags = "\n".join(
        f'        "{" ".join(each.name)}")\n            flags="{_words([flag.name for flag in each.flags])}"'
        f' config="{"yes" if each.config else ""}" start="{_words(each.first)}"\n            ;;'
        for each in commands
    )
    return _BASH.format(
        program=PROGRAM,
        fields=_words([flag.name for flag in fields]),
        below="\n".join(
            f'    {name})\n        first=3\n        command="$command ${{COMP_WORDS[2]}}"\n        ;;' for name in below
        ),
        commands=_words([*COMMANDS]),
        names_below="\n".join(
            f'        "{name} "*)\n            words="{_words(names)}"\n            ;;' for name, names in below.items()
        ),
        flags=flags,
        values="\n".join(
            f'        "{" ".join(each.name)} {flag.name}") words="{_words(flag.values)}" ;;'
            for each in commands
            for flag in each.flags
            if flag.takes
        ),
        field_values="\n".join(
            f'                {flag.name}) words="{_words(flag.values)}" ;;' for flag in fields if flag.values
        ),
    )


_ZSH = r"""#compdef {program}
# Completes {program} in zsh. Load it with: source <({program} completion zsh), after compinit
_raytune_fsdp() {{
    local current=$words[CURRENT] before=$words[CURRENT-1] command=$words[2] config="" first=3
    local -a known start fields
    if [[ $current == --*=* ]]; then
        before=${{current%%=*}}
        compset -P '*='
    fi
    if ((CURRENT == 2)); then
        known=({commands})
        _describe command known
        return
    fi
    case $command in
{below}
    esac
    case $command in
{flags}
    esac
    case "$command $before" in
{values}
    esac
    if [[ $config ]]; then
        case $before in
{field_values}
        esac
    fi
    if [[ $current == -* && $current != *=* ]]; then
        [[ $config ]] && known+=({fields})
        _describe -o flag known
    elif ((CURRENT == first)) && (($#start)); then
        compadd -a start
    else
        _files
    fi
}}
if [[ $funcstack[1] == _raytune_fsdp ]]; then
    _raytune_fsdp "$@"
else
    compdef _raytune_fsdp {program}
fi
"""


def zsh(commands: Sequence[CommandWords], fields: Sequence[Flag]) -> str:
    def described(flag: Flag) -> str:
        return _quoted(f"{flag.name}:{_short(flag.about)}")

    def values(flag: Flag, indent: str) -> str:
        found = [f"compadd -- {_words(flag.values)}"] if flag.values else []
        return f"{indent}{'; '.join([*found, *(['_files'] if flag.path or not found else []), 'return'])}\n{indent};;"

    below = _below(commands)
    names = {each.name: each.about for each in commands}
    return _ZSH.format(
        program=PROGRAM,
        commands=_words([_quoted(f"{name}:{about}") for name, about in COMMANDS.items()]),
        below="\n".join(
            f"    {name})\n        if ((CURRENT == 3)); then\n            known=("
            + _words([_quoted(f"{each}:{names[name, each]}") for each in under])
            + ")\n            _describe command known\n            return\n        fi\n        first=4\n"
            '        command="$command $words[3]"\n        ;;'
            for name, under in below.items()
        ),
        flags="\n".join(
            f"    '{' '.join(each.name)}')\n        known=({_words([described(flag) for flag in each.flags])})\n"
            f"        start=({_words(each.first)}) config={'yes' if each.config else ''}\n        ;;"
            for each in commands
        ),
        values="\n".join(
            f"    '{' '.join(each.name)} {flag.name}')\n{values(flag, ' ' * 8)}"
            for each in commands
            for flag in each.flags
            if flag.takes
        ),
        field_values="\n".join(f"        {flag.name})\n{values(flag, ' ' * 12)}" for flag in fields),
        fields=_words([described(flag) for flag in fields]),
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_FISH = r"""# Completes {program} in fish. Save it as ~/.config/fish/completions/{program}.fish
function __raytune_fsdp_at
    set -l given (commandline -opc)
    test (count $given) -gt (count $argv); or return 1
    for number in (seq (count $argv))
        test $given[(math $number + 1)] = $argv[$number]; or return 1
    end
end
function __raytune_fsdp_after
    set -l given (commandline -opc)
    test (count $given) -eq (math (count $argv) + 1); and __raytune_fsdp_at $argv
end
function __raytune_fsdp_config
    for command in {config}
        __raytune_fsdp_at (string split ' ' $command); and return 0
    end
    return 1
end
"""


def fish(commands: Sequence[CommandWords], fields: Sequence[Flag]) -> str:
    def line(condition: str, *rest: str) -> str:
        return f"complete -c {PROGRAM} -n '{condition}' {' '.join(rest)}"

    def flag_line(condition: str, flag: Flag) -> str:
        takes = [] if not flag.takes else ["-r"] if flag.path or not flag.values else ["-x"]
        values = ["-a", _fish_quoted(_words(flag.values))] if flag.values else []
        return line(
            condition, "-l", flag.name.removeprefix("--"), *takes, *values, "-d", _fish_quoted(_short(flag.about))
        )

    config = [_fish_quoted(" ".join(each.name)) for each in commands if each.config]
    lines = [
        line("test (count (commandline -opc)) -eq 1", "-f", "-a", name, "-d", _fish_quoted(about))
        for name, about in COMMANDS.items()
    ]
    for each in commands:
        here = " ".join(each.name)
        if len(each.name) > 1:
            after = f"__raytune_fsdp_after {each.name[0]}"
            lines.append(line(after, "-f", "-a", each.name[1], "-d", _fish_quoted(each.about)))
        if each.first:
            lines.append(line(f"__raytune_fsdp_after {here}", "-f", "-a", _fish_quoted(_words(each.first))))
        lines += [flag_line(f"__raytune_fsdp_at {here}", flag) for flag in each.flags]
    lines += [flag_line("__raytune_fsdp_config", flag) for flag in fields]
    return _FISH.format(program=PROGRAM, config=_words(config)) + "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: Mapping[str, Callable[[Sequence[CommandWords], Sequence[Flag]], str]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}
"""The function that writes the script of each shell."""
