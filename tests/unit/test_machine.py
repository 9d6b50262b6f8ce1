"""What a process knows of its machine. To be ended by the kernel it needs a control group of its own, as root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raytune_fsdp.base import machine
from raytune_fsdp.base.machine import free_memory, group_of, this_node
from tests.control_groups import limited

LIMIT = 64 << 20
GREEDY = "import sys; sys.stdin.readline(); x = bytearray(200 << 20); print(len(x))"


@pytest.fixture
def group() -> Iterator[Path]:
    with limited("raytune-test", LIMIT) as found:
        if found is None:
            pytest.skip("no control group can be made here")
        yield found


def test_a_process_that_takes_more_than_it_may(group: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    (group / "cgroup.procs").write_text(str(process.pid))
    known = group_of(process.pid)
    assert known is not None and known.limit == LIMIT
    before = known.kills()
    assert process.communicate("\n", timeout=60)[0] == ""
    assert process.returncode == -9
    assert known.kills() == before + 1


@pytest.mark.parametrize(
    ("version", "limit", "taken"), [("_V2", "memory.max", ("anon", "shmem")), ("_V1", "memory.limit_in_bytes", None)]
)
def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, limit: str, taken: tuple[str, str] | None
) -> None:
    for name in ("_V1", "_V2"):
        monkeypatch.setattr(machine, name, tmp_path / name)
        (tmp_path / name).mkdir()
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    if not any((line.startswith("0:") if version == "_V2" else ":memory:" in line) for line in lines):
        pytest.skip(f"no control groups of version {version[-1]} here")
    place = tmp_path / version
    assert 0 < free_memory() <= psutil.virtual_memory().total, "without a limit, the machine's"
    (place / limit).write_text("1000000\n")
    # The cache of files is given back when memory is asked for; what lies in /dev/shm is not.
    held, shared = taken or ("total_rss", "total_shmem")
    (place / "memory.stat").write_text(f"{held} 300000\nfile 600000\n{shared} 100000\n")
    assert free_memory() == 600_000
    (place / "memory.stat").write_text(f"{held} 3000000\n{shared} 0\n")
    assert free_memory() == 0, "more than the limit leaves nothing"
    (place / limit).write_text("max\n" if version == "_V2" else f"{(1 << 63) - 4096}\n")
    assert free_memory() > 1_000_000


def test_machines_of_one_name_are_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = []
    for boot in ("one", "other"):
        monkeypatch.setattr(machine, "_BOOT", tmp_path / boot)
        nodes.append(this_node())  # without a boot id, by name
        (tmp_path / boot).write_text(f"{boot}\n")
        nodes.append(this_node())
    assert nodes[0] == nodes[2]
    assert nodes[1] != nodes[3] and nodes[1][0] == nodes[3][0] == nodes[0][0]


def test_a_process_that_is_gone_has_none() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert group_of(done.pid) is None
    assert group_of(os.getpid()) is None or group_of(os.getpid()).limit > 0  # type: ignore[union-attr]
