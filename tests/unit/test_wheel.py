"""What somebody gets who installs the package and never sees the repository."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from raytune_fsdp import __version__

ROOT = Path(__file__).parents[2]
LIGHT = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "yaml")
"""All that reading a config imports; linked from this environment, so that nothing is downloaded."""
# A file of every kind that is not Python.
WANTED = [
    "py.typed",
    "demo/conversations.jsonl",
    "demo/preferences.jsonl",
    "demo/classes.jsonl",
    "demo/tokenizer/tokenizer.json",
    "recipes/demo.yaml",
    "recipes/demo-preferences.yaml",
    "recipes/demo-reward.yaml",
    "recipes/demo-distill.yaml",
    "record/report/page.html.jinja",
    "record/report/page.css",
    "record/report/page.js",
    "record/report/runs.html.jinja",
    "record/report/runs.js",
    "predict/architectures.json",
    "predict/page/page.html.jinja",
    "predict/page/page.css",
    "predict/page/page.js",
    "recipes/llama2-70b-full-16xa100.yaml",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("source"))


def built(source: Path) -> Path:
    """Built from a copy, as a build leaves its files in the source and takes up those of the last one."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("raytune_fsdp", "jobs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in a new environment that has nothing but the wheel."""
    environment = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", *install],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return environment / "bin" / "raytune-fsdp"


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("light")
    for name in LIGHT:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        there = Path(spec.origin)
        there = there.parent if there.name == "__init__.py" else there
        (directory / there.name).symlink_to(there)
    return directory


def run(program: Path, *arguments: str, path: Path | None = None) -> str:
    """What it prints, started from a directory that has nothing to do with the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([program, *arguments], cwd=program.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_version_everywhere(wheel: Path) -> None:
    assert wheel.name.startswith(f"raytune_fsdp-{__version__}-")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## 0"))
    assert newest.split()[1] == __version__


def test_it_is_tested_on_the_oldest_that_it_allows() -> None:
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = dict(line.split("==") for line in (ROOT / "requirements-oldest.lock").read_text().split() if "==" in line)
    for name in ("torch", "transformers"):
        (floor,) = [re.split("[>=,]+", each)[1] for each in allowed if each.startswith(f"{name}>=")]
        assert pinned[name] == f"{floor}.0"


def test_it_holds_every_file_that_is_read(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in WANTED if f"raytune_fsdp/{name}" not in inside] == []
    package = ROOT / "raytune_fsdp"
    files = [*package.rglob("*.py"), *package.rglob("*.jinja")]
    assert [str(file) for file in files if file.relative_to(ROOT).as_posix() not in inside] == []
    assert not [name for name in inside if not name.startswith(("raytune_fsdp/", "raytune_fsdp-"))]


@pytest.mark.slow
def test_the_command_needs_no_package_for_its_usage(program: Path) -> None:
    assert run(program, "--help").startswith("usage: raytune-fsdp COMMAND")


@pytest.mark.slow
def test_configs_need_only_light_packages(program: Path, light: Path) -> None:
    assert "--optim.schedule.decay" in run(program, "train", "--help", "optim", path=light)


@pytest.mark.slow
def test_recipes_are_found_by_name(program: Path, light: Path) -> None:
    shown = run(program, "plan", "--config", "llama2-70b-full-16xa100", "--world-size", "16", path=light)
    assert "llama2-70b-full" in shown


@pytest.mark.slow
def test_a_recipe_that_is_copied_names_the_package_s_own_data(program: Path, light: Path, tmp_path: Path) -> None:
    """From a wheel there is no repository whose relative paths it could name."""
    copy = tmp_path / "mine.yaml"
    assert f"copied to {copy}" in run(program, "recipes", "copy", "demo", str(copy), path=light)
    config = yaml.safe_load(copy.read_text())
    places = [config["model"]["tokenizer"], config["data"]["train"][0]["path"], config["data"]["eval"][0]["path"]]
    assert all(Path(place).exists() and Path(place).is_relative_to(program.parents[1]) for place in places)
    assert run(program, "recipes", "show", "demo", path=light) == copy.read_text()
    assert '"FinetuneConfig"' in run(program, "schema", path=light)
