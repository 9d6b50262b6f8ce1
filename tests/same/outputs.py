"""What the commands of two trees print, and the files that their runs and wheels leave."""

from __future__ import annotations

import difflib
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "train", "data", "plan", "doctor", "generate", "chat", "eval", "diff", "step", "audit", "report", "runs", "watch",
    "logs", "checkpoint", "stop", "digest", "export", "average", "recipes", "convert", "schema",
)  # fmt: skip
WITH_FIELDS = {"train", "plan", "doctor", "eval", "step", "audit", "preview", "stats"}
"""Their help lists the fields of the config: in older trees always, now with `--help all`, which those take, too."""
RECIPES = (
    "demo", "llama3-8b-full-8xa100", "llama3-70b-qlora", "llama3-70b-32xa100-tensor", "qwen3-30b-a3b-full",
    "llama3.1-405b-lora-16xh200",
)  # fmt: skip
GPUS = {"llama3-70b-32xa100-tensor": 32, "llama3.1-405b-lora-16xh200": 128}
SAYS_WHEN = {"README.md", "recipe.json", "raytune_fsdp_export.json"}
"""Files of an export that name the machine or the time, and the one with their hashes."""


def before_runs(configs: Mapping[str, Path]) -> dict[str, list[str]]:
    """Commands by what is compared; none needs a run. `configs` are files of runs."""
    lines = [["--help"], *([name, "--help"] for name in COMMANDS)]
    lines += [["data", what, "--help"] for what in ("preview", "stats", "clean")]
    lines = [[*line, "all"] if line[-2:-1] and line[-2] in WITH_FIELDS else line for line in lines]
    lines += [["schema"], ["recipes"], *(["recipes", "show", name] for name in RECIPES)]
    for name in RECIPES:
        world = str(GPUS.get(name, 8))
        lines += [["plan", "--config", name, "--world-size", world, "--json", "--gpu", "A100-80GB"]]
        lines += [["plan", "--config", name, "--world-size", world]]
    for path in sorted((ROOT / "tests" / "unit" / "convert").glob("*.yaml")):
        lines.append(["convert", str(path), *(["--gpus", "8"] if not path.name.startswith("accelerate") else [])])
    for path in configs.values():
        lines += [["data", "preview", "--config", str(path)], ["plan", "--config", str(path), "--json", "--units"]]
    return {" ".join(Path(word).name if "/" in word else word for word in line): line for line in lines}


def after_runs(runs: Path, lora: str, full: str) -> dict[str, list[str]]:
    """Commands on two of the runs."""
    found = {}
    for name in (lora, full):
        run = str(runs / name)
        lines = [
            ["step", run, "3", "--text"], ["eval", run, "--json"], ["generate", f"{run}/export", "w5 w6", "w1"],
            ["checkpoint", "verify", run], ["export", run, f"{run}-again", "--merge", "--dtype", "bf16"],
        ]  # fmt: skip
        found |= {" ".join([name, *line]).replace(f"{runs}/", ""): line for line in lines}
    return {**found, "diff": ["diff", str(runs / lora), str(runs / full)]}


def difference(name: str, was: str, now: str) -> tuple[str | None, str]:
    """In a line what differs, None if nothing does, and what else to say. Of help only the flags count, of a schema
    and of a config all but descriptions and comments: their words may be better now."""
    if was == now:
        return None, "equal"
    if "--help" in name and _flags(was) == _flags(now):
        return None, "the same flags in other words"
    if name == "schema" and _without_words(was) == _without_words(now):
        return None, "the same schema in other words"
    if name.startswith("convert") and _without_comments(was) == _without_comments(now):
        return None, "the same config with other comments"
    lines = difflib.unified_diff(was.splitlines(), now.splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return f"{len(changed)} lines, the first: {' | '.join(line[:150] for line in changed[:2])}", ""


def _without_words(text: str) -> list[str]:
    return [line for line in text.splitlines() if '"description":' not in line]


def _without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def _flags(text: str) -> list[str]:
    return sorted(set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w.-]*", text)))


def files_of_export(directory: Path) -> dict[str, str]:
    """The hash of every file of an export, but of those that say when it was made."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name not in SAYS_WHEN
    }


def files_of_wheel(code: Path, scratch: Path) -> list[str]:
    """The names and hashes of what a tree's wheel has besides Python; where the files lie may change."""
    scratch.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(code / name, scratch)
    for name in ("raytune_fsdp", "jobs"):
        shutil.copytree(code / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=scratch, capture_output=True, check=True)
    (wheel,) = (scratch / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".py") and ".dist-info/" not in name]
        return sorted(f"{Path(name).name} {hashlib.sha256(archive.read(name)).hexdigest()[:16]}" for name in names)


def printed(directory: Path, names: Sequence[str], replaced: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What each command has printed, with the places of its tree under names that both have."""
    for name in names:
        file = directory / file_name(name)
        text = file.read_text() if file.exists() else "it was not run"
        for place, what in replaced.items():
            text = text.replace(place, what)
        yield name, text


def file_name(command: str) -> str:
    return re.sub(r"[^\w.-]+", "_", command)[:100] + ".txt"
