"""The rules of the house that no linter checks: sizes, names, what an import may pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "raytune_fsdp").rglob("*.py"), *(ROOT / "jobs").glob("*.py")])
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common_utils", "misc", "manager", "core"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_stay_small(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{file.name}:{node.lineno} {node.name} has {length} lines"


def test_no_file_is_called_after_nothing() -> None:
    assert not [file for file in FILES if file.stem in FORBIDDEN_NAMES]


@pytest.mark.parametrize(
    "module",
    ["raytune_fsdp", "raytune_fsdp.config", "raytune_fsdp.plan", "raytune_fsdp.cli.main", "raytune_fsdp.errors"],
)
def test_importing_it_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in ('torch', 'ray', 'mlflow', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_every_public_name_is_there() -> None:
    import raytune_fsdp

    assert raytune_fsdp.__all__ == sorted(raytune_fsdp.__all__)
    assert set(raytune_fsdp.__all__) == {"FinetuneConfig", "FinetuneResult", "RaytuneError", "finetune"}
    for name in raytune_fsdp.__all__:
        assert getattr(raytune_fsdp, name).__name__ == name
