"""What the kernel says of a process that it has ended for its memory. Needs a control group of its own, as root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray.control_group import group_of
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


def test_a_process_that_is_gone_has_none() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert group_of(done.pid) is None
    assert group_of(os.getpid()) is None or group_of(os.getpid()).limit > 0  # type: ignore[union-attr]
