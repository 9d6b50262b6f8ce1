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
