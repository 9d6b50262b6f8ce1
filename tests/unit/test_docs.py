"""What the documentation says of the repository is there: files, functions, links, commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.cli.audit import DIFFERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "raytune_fsdp"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
SPEAK_OF_CODE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {
    *("checkpoints/", "documents/", "export/", "exports/", "logs/", "mlflow_model/", "profile/", "report/"),  # of a run
    *("mlartifacts/", "wandb/", "convert_hf_to_gguf.py"),  # of MLflow, of Weights & Biases, of llama.cpp
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("page", SPEAK_OF_CODE, ids=name_of)
def test_paths_and_names_exist(page: Path) -> None:
    """Backticks: a file (`step/train_step.py`), a name in it (`plan/plan.py:resolve`), a directory (`data/rows/`)."""
    for path, name in re.findall(r"`([\w./-]+(?:\.py|/))(?::([\w.]+))?`", page.read_text()):
        if path in ELSEWHERE:
            continue
        found = [place for place in (ROOT / path, PACKAGE / path, page.parent / path) if place.exists()]
        assert found, f"{name_of(page)}: there is no {path}"
        assert not name or name in names_in(found[0]), f"{name_of(page)}: {path} has no {name}"


def test_the_walks_and_the_owners_name_functions() -> None:
    for page, least in (("architecture.md", 50), ("design/walks.md", 40)):
        named = re.findall(r"`[\w/]+\.py:[\w.]+`", (ROOT / "docs" / page).read_text())
        assert len(named) > least, page


def test_the_architecture_is_short_and_its_pictures_are_true() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.split()) <= 2500
    for path in re.findall(r"(?<![\w/])\w+/[\w/]+\.py\b", text):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path


def test_every_page_of_the_design_is_listed() -> None:
    pages = {page.name for page in (ROOT / "docs" / "design").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "design" / "README.md").read_text()))
    assert pages == set(re.findall(r"\]\(design/([\w-]+\.md)\)", (ROOT / "docs" / "architecture.md").read_text())) - {
        "README.md"
    }


def test_one_afternoon_is_enough_for_the_spine() -> None:
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition("## One afternoon\n")
    spine = re.findall(r"^\d+\. `([\w/]+\.py)`", rest.partition("\n## ")[0], re.MULTILINE)
    assert len(spine) > 10
    assert sum(len((PACKAGE / file).read_text().splitlines()) for file in spine) <= 4000


def test_the_tree_has_every_room() -> None:
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition("## The tree\n")
    tree = set(re.findall(r"[\w/]+/", rest.partition("\n## ")[0]))
    for inside in PACKAGE.rglob("__init__.py"):
        assert f"{inside.parent.name}/" in tree, f"{inside.parent} is not in the tree of CONTRIBUTING.md"


def names_in(file: Path) -> set[str]:
    """Functions, classes, methods and fields (as Class.method) and constants of a module."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= {f"{node.name}.{field.id}" for field in fields if isinstance(field, ast.Name)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks that begin with a directory of the repository."""
    for path in re.findall(
        r"`((?:raytune_fsdp|tests|benchmarks|jobs|docs|launch|run|checkpoint|data|model)/[\w./]+\.\w+)",
        page.read_text(),
    ):
        places = [ROOT / path, ROOT / "raytune_fsdp" / path]
        assert any(place.exists() for place in places) or path.startswith("data/"), f"{page.name}: {path}"


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md", "docs/design/failures.md"])
def test_every_exit_code_is_on_the_page(page: str) -> None:
    kinds = [RaytuneError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    _, _, said = re.split(r"^(\*\*Exit codes\.\*\*|## Exit codes\n)", (ROOT / page).read_text(), flags=re.MULTILINE)
    listed = {int(code) for code in re.findall(r"\b\d+\b", said.strip().partition("\n\n")[0])}
    assert listed == {0, DIFFERS, *(kind.exit_code for kind in kinds)}
