"""The numbers of the house, printed by `make check`: `python -m tests.house [PACKAGE]`.

Where a rule follows from a number, tests/unit/test_house.py holds it; the others show where the code is going.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "raytune_fsdp"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
STORIES = {"run/assemble.py assemble": 80, "run/prepare.py prepare": 80, "run/loop.py train": 80}
"""Functions that tell a whole story in its order, and how long they may be: cut up, it would have to be put together
again by each reader."""


@dataclass
class House:
    files: int = 0
    lines: int = 0
    functions: int = 0
    used_once: list[str] = field(default_factory=list)
    """Private functions and methods that their file names in one place."""
    comment_lines: int = 0
    comments_after_code: int = 0
    long_files: list[str] = field(default_factory=list)
    long_functions: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Public classes by name, with the files that have one."""
    named: set[str] = field(default_factory=set)
    """What code names, other than where it is defined or imported."""
    top: list[tuple[str, str]] = field(default_factory=list)
    """Functions that are in nothing else: the file, and the name."""

    @property
    def same_names(self) -> list[str]:
        return [f"{name} in {', '.join(files)}" for name, files in self.classes.items() if len(files) > 1]

    def numbers(self) -> str:
        comments, all_comments = self.comment_lines, self.comment_lines + self.comments_after_code
        rows = [
            ("files, lines, functions", f"{self.files}, {self.lines}, {self.functions}"),
            ("private functions used once", f"{100 * len(self.used_once) / self.functions:.0f} % of all functions"),
            (
                "comment lines",
                f"{100 * comments / self.lines:.1f} in 100 lines; "
                f"{100 * all_comments / self.lines:.1f} with comments after code",
            ),
            (f"files over {MAX_FILE_LINES} lines", listed(self.long_files)),
            (f"functions over {MAX_FUNCTION_LINES} lines", listed(self.long_functions)),
            ("public classes of the same name", listed(self.same_names)),
        ]
        return "\n".join(f"{what:32} {number}" for what, number in rows)


def look_at(package: Path = PACKAGE, *, comments: bool = True) -> House:
    """Count the Python files of a package. Its comments take as long as all else."""
    house = House()
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        count(house, str(file.relative_to(package)), text)
        if comments:
            count_comments(house, text)
    return house


def count(house: House, file: str, text: str) -> None:
    lines = text.splitlines()
    house.files += 1
    house.lines += len(lines)
    if len(lines) > MAX_FILE_LINES:
        house.long_files.append(f"{file} ({len(lines)})")
    tree = ast.parse(text)
    named = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    house.named |= named.keys()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            house.functions += 1
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > STORIES.get(f"{file} {node.name}", MAX_FUNCTION_LINES):
                house.long_functions.append(f"{file}:{node.lineno} {node.name} ({length})")
            if node.name.startswith("_") and not node.name.endswith("__") and named[node.name] == 1:
                house.used_once.append(f"{file}:{node.lineno} {node.name}")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            house.top.append((file, node.name))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            house.classes[node.name].append(file)


def count_comments(house: House, text: str) -> None:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            house.comment_lines += alone
            house.comments_after_code += not alone


def listed(found: list[str]) -> str:
    return f"{len(found)}: {'; '.join(found)}" if found else "0"


if __name__ == "__main__":
    print(look_at(*map(Path, sys.argv[1:])).numbers())
