"""`completion`: what the scripts make of a command line, in the shells themselves where they are installed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from shutil import which

import pytest

from raytune_fsdp.cli.completion import commands, fields
from raytune_fsdp.cli.completion_scripts import SCRIPTS
from raytune_fsdp.cli.main import COMMANDS, main
from raytune_fsdp.config.load import recipes

LINES: Mapping[str, set[str]] = {
    "": set(COMMANDS),
    "tr": {"train"},
    "data ": {"preview", "stats", "clean"},
    "data preview --sam": {"--samples"},
    "data clean --optim.": set(),
    "train --dry": {"--dry-run"},
    "fork runs/x --unp": {"--unpin"},
    "fork runs/x --optim.weight": {"--optim.weight_decay"},
    "train --optim.weight": {"--optim.weight_decay"},
    "train --data.train.0.sh": {"--data.train.0.share"},
    "train --parallel.strategy ": {"full_shard", "shard_grad_op", "hybrid_shard", "replicate"},
    "train --run.exact ": {"true", "false"},
    "train --config mix": {"mixture"},
    "train --help opt": {"optim"},
    "export --dtype ": {"trained", "bf16", "fp16", "fp32"},
    "recipes ": {"list", "show", "copy"},
    "recipes show --": {"--help"},
    "checkpoint ve": {"verify"},
    "generate model --optim.lr": set(),
    "eval runs/x --lm-eval-t": {"--lm-eval-tasks"},
    "completion ": {"bash", "zsh", "fish"},
}
"""What may follow the beginning of a line; files are left to the shell."""


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    found = {}
    for shell in SCRIPTS:
        assert main(["completion", shell]) == 0
        found[shell] = tmp_path / f"completion.{shell}"
        found[shell].write_text(capsys.readouterr().out)
    return found


def ran(*command: str, said: str = "") -> str:
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_bash(scripts: Mapping[str, Path]) -> None:
    asked = dict(LINES) | {
        "train --parallel.strategy = hy": {"hybrid_shard"},
        "train --parallel.strategy =": LINES["train --parallel.strategy "],
    }
    program = [f"source {scripts['bash']}"]
    for line in asked:
        words = ["raytune-fsdp", *line.split(" ")]
        program.append(f"COMP_WORDS=({' '.join(repr(word) for word in words)}) COMP_CWORD={len(words) - 1}")
        program.append('COMPREPLY=(); _raytune_fsdp; echo "${COMPREPLY[@]}"')
    answers = ran("bash", "--norc", "-s", said="\n".join(program)).splitlines()
    assert {line: set(answer.split()) for line, answer in zip(asked, answers, strict=True)} == asked


@pytest.mark.skipif(which("fish") is None, reason="fish is not installed")
def test_fish(scripts: Mapping[str, Path], tmp_path: Path) -> None:
    files = ("train --config mix",)  # fish names files as well
    for line, wanted in LINES.items():
        said = ran(
            "fish", "--no-config", "-c", f"cd {tmp_path}; source {scripts['fish']}; complete -C 'raytune-fsdp {line}'"
        )
        found = {each.split("\t")[0] for each in said.splitlines()}
        assert wanted <= found if line in files or not wanted else wanted == found, line


_STUBS = """
_describe() { [[ $1 == -o ]] && shift; print -l -- ${${(P)2}%%:*} }
compadd() { if [[ $1 == -a ]]; then print -l -- ${(P)2}; else shift; print -l -- "$@"; fi }
_files() { }
compset() { }
compdef() { }
"""
"""What the script calls of zsh's completion, printing what would be offered."""


@pytest.mark.skipif(which("zsh") is None, reason="zsh is not installed")
def test_zsh(scripts: Mapping[str, Path]) -> None:
    asked = dict(LINES) | {"train --parallel.strategy=hy": {"full_shard", "shard_grad_op", "hybrid_shard", "replicate"}}
    program = [_STUBS, f"source {scripts['zsh']}"]
    for line in asked:
        words = ["raytune-fsdp", *line.split(" ")]
        program.append(f"words=({' '.join(repr(word) for word in words)}) CURRENT={len(words)}")
        program.append("print -- $(_raytune_fsdp)")
    answers = ran("zsh", "-f", "-s", said="\n".join(program)).splitlines()
    for (line, wanted), answer in zip(asked.items(), answers, strict=True):
        begins = "" if "=" in line else line.rpartition(" ")[2]  # zsh keeps what begins like the word
        assert {each for each in answer.split() if each.startswith(begins)} == wanted, line


def test_every_script_has_every_word(scripts: Mapping[str, Path]) -> None:
    flags = {flag.name for each in commands() for flag in each.flags} | {flag.name for flag in fields()}
    assert {"--lm-eval", "--no-browser", "--optim.lr", "--data.eval.0.path"} <= flags and len(flags) > 250
    for shell, script in scripts.items():
        text = script.read_text()
        missing = [flag for flag in flags if (flag if shell != "fish" else f"-l {flag[2:]} ") not in text]
        assert not missing and all(name in text for name in (*COMMANDS, *recipes())), shell
