"""How much memory there is for the copies of a save."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from raytune_fsdp.checkpoint import room


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_CGROUP", tmp_path)
    assert 0 < room.free_memory() <= psutil.virtual_memory().total, "without a cgroup, the machine's"
    (tmp_path / "memory.max").write_text("1000000\n")
    # The cache of files is given back when memory is asked for; what lies in /dev/shm is not.
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 600000\nshmem 100000\n")
    assert room.free_memory() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert room.free_memory() > 1_000_000


def test_more_than_the_limit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\nshmem 0\n")
    assert room.free_memory() == 0


def test_machines_of_one_name_are_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = []
    for boot in ("one", "other"):
        monkeypatch.setattr(room, "_BOOT", tmp_path / boot)
        nodes.append(room.this_node())  # without a boot id, by name
        (tmp_path / boot).write_text(f"{boot}\n")
        nodes.append(room.this_node())
    assert nodes[0] == nodes[2]
    one, other = nodes[1], nodes[3]
    assert one != other and one[0] == other[0] == nodes[0][0]
    assert room._worst([(one, 60, 100), (other, 60, 100)]) is None
    assert room._worst([(one, 60, 100), (one, 60, 90)]) == {"node": one[0], "wanted": 120, "free": 90}
    assert room._worst([(one, 60, 100), (other, 60, 50), (one, 20, 100)]) == {
        "node": other[0], "wanted": 60, "free": 50,
    }  # fmt: skip
