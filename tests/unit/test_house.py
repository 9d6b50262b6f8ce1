"""The rules of the house that no linter checks: sizes, names, what an import may pull in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import House, look_at

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "raytune_fsdp").rglob("*.py"), *(ROOT / "jobs").glob("*.py")])
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common_utils", "misc", "manager", "core"}


@pytest.fixture(scope="module")
def house() -> House:
    return look_at(comments=False)


def test_files_stay_small(house: House) -> None:
    assert house.long_files == []


def test_functions_stay_small(house: House) -> None:
    assert house.long_functions == []


def test_a_name_means_one_class(house: House) -> None:
    assert house.same_names == []


def test_what_the_numbers_count(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "# alone\nclass Twice:\n    def _once(self):\n        return self._often() + self._often()  # after code\n\n"
        "    def _often(self):\n        return self._once()\n\n\ndef _never():\n    return '# no comment'\n"
    )
    (tmp_path / "two.py").write_text("class Twice:\n    def long(self):\n" + "        self.x = 1\n" * 600)
    found = look_at(tmp_path)
    assert (found.files, found.lines, found.functions) == (2, 613, 4)
    assert found.used_once == ["one.py:3 _once"]
    assert (found.comment_lines, found.comments_after_code) == (1, 1)
    assert (found.long_files, found.long_functions) == (["two.py (602)"], ["two.py:2 long (601)"])
    assert found.same_names == ["Twice in one.py, two.py"]


def test_no_file_is_called_after_nothing() -> None:
    assert not [file for file in FILES if file.stem in FORBIDDEN_NAMES]


def test_a_rank_is_there_before_it_imports_transformers() -> None:
    """What Ray unpickles to start a rank: the driver waits for its first word, and transformers takes seconds."""
    pytest.importorskip("ray")
    fields = "from raytune_fsdp.launch.ray.rank import RankJob; from dataclasses import fields"
    types = "import raytune_fsdp.config, raytune_fsdp.base.measured"
    types += ", raytune_fsdp.launch.ray.board, raytune_fsdp.launch.shared_storage"
    code = f"{fields}; {types}; import sys; print('transformers' in sys.modules, *[f.name for f in fields(RankJob)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    # `prepared` is a reference; what else a job carries must come from the modules above.
    carried = ["config", "prepared", "first", "board", "device", "token", "looks", "verbose", "in_ray_log"]
    carried += ["forced", "notices", "predicted"]
    assert done.stdout.split() == ["False", *carried]


LISTS = {"cli", "convert", "config/sections"}
"""Rooms of files that are alike: commands, converters, sections. They may be as many as there are."""


def rooms() -> list[Path]:
    return sorted(each.parent for each in (ROOT / "raytune_fsdp").rglob("__init__.py"))


def test_a_room_can_be_looked_over() -> None:
    sizes = {str(room.relative_to(ROOT / "raytune_fsdp")): len([*room.glob("[!_]*.py")]) for room in rooms()}
    assert not {room: size for room, size in sizes.items() if size > 20 and room not in LISTS}
    assert sizes["."] == 0, "the root has rooms and its __init__ only"


@pytest.mark.parametrize("room", [pytest.param(each, id=each.name) for each in rooms()])
def test_a_room_says_what_is_in_it(room: Path) -> None:
    """All of it, nothing that is gone, and by no code."""
    tree = ast.parse((room / "__init__.py").read_text())
    said = ast.get_docstring(tree) or ""
    there = {each.stem for each in room.glob("*.py")} | {each.parent.name for each in room.glob("*/__init__.py")}
    missing = {name for name in there - {"__init__"} if not re.search(rf"\b{name}\b", said)}
    assert not missing
    gone = set(re.findall(r"(?<![\w/])(\w+)\.py\b", said)) - there
    assert not {name for name in gone if not (room.parent / f"{name}.py").exists()}
    if room.name not in ("raytune_fsdp", "config", "demo", "tune"):
        assert len(tree.body) == 1


def test_every_public_name_is_there() -> None:
    import raytune_fsdp

    assert raytune_fsdp.__all__ == sorted(raytune_fsdp.__all__)
    assert {"FinetuneConfig", "FinetuneResult", "RaytuneError", "finetune", "load_config"} < set(raytune_fsdp.__all__)
    for name in raytune_fsdp.__all__:
        assert getattr(getattr(raytune_fsdp, name), "__name__", name) == name  # a union of types has none


_ASKS = ("check_", "warn_", "refuse_", "try_", "prove_")


def test_nothing_that_refuses_or_proves_is_forgotten(house: House) -> None:
    """A check that no order calls is worse than none: people read it and rely on it."""
    jobs = look_at(ROOT / "jobs", comments=False)
    asks = [f"{file} {name}" for file, name in house.top + jobs.top if name.lstrip("_").startswith(_ASKS)]
    assert len(asks) > 100
    assert [name for name in asks if name.split()[1] not in house.named | jobs.named] == []
