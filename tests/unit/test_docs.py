"""What the documentation says of the repository is there: files, functions, links, commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.cli.audit import DIFFERS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name}: {target} has no such heading"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_functions_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / page).read_text())
    if page == "docs/architecture.md":
        assert len(named) > 40, "five walks and a table of owners"
    for file, name in named:
        assert name in names_in(ROOT / "raytune_fsdp" / file), f"{page}: {file} has no {name}"


def names_in(file: Path) -> set[str]:
    """Functions, classes, methods (as Class.method) and constants of a module."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks that begin with a directory of the repository."""
    for path in re.findall(
        r"`((?:raytune_fsdp|tests|benchmarks|jobs|docs|launch|run|checkpoint|data|model)/[\w./]+\.\w+)",
        page.read_text(),
    ):
        places = [ROOT / path, ROOT / "raytune_fsdp" / path]
        assert any(place.exists() for place in places) or path.startswith("data/"), f"{page.name}: {path}"


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md", "docs/architecture.md"])
def test_every_exit_code_is_on_the_page(page: str) -> None:
    kinds = [RaytuneError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    _, _, said = re.split(r"^(\*\*Exit codes\.\*\*|## Exit codes\n)", (ROOT / page).read_text(), flags=re.MULTILINE)
    listed = {int(code) for code in re.findall(r"\b\d+\b", said.strip().partition("\n\n")[0])}
    assert listed == {0, DIFFERS, *(kind.exit_code for kind in kinds)}
