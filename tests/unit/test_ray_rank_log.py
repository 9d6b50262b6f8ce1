"""What a rank prints is in the run, and without secrets in Ray's log of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

PRINTS = """
import os, sys, time
from pathlib import Path
from raytune_fsdp.launch.ray.rank_log import RankLog

print("before")
path = Path(sys.argv[1])
log = RankLog(path, in_ray=sys.argv[2] == "in_ray")
print("printed, HF_TOKEN=hf_" + "a" * 34)
os.system("echo of another program >&2")
os.write(2, b"\\xff no text")
sys.stdout.flush()
if log.in_ray is not None:
    print("step 1", file=log.in_ray)
os.write(1, b", the end of the line\\n")
log.copy()
log.copy()
"""


@pytest.mark.parametrize("where", ["in_ray", "not"])
def test_what_a_rank_prints(tmp_path: Path, where: str) -> None:
    log = tmp_path / "logs" / "rank-0.log"
    done = subprocess.run([sys.executable, "-c", PRINTS, str(log), where], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    own = log.read_bytes()
    assert b"hf_aaaa" in own and b"of another program\n\xff no text, the end of the line\n" in own
    assert b"before" not in own and b"step 1" not in own
    said = done.stdout.decode().splitlines()
    if where == "not":
        assert said == ["before"]
    else:
        assert sorted(said) == sorted(
            ["before", "printed, HF_TOKEN=<redacted>", "of another program", "� no text, the end of the line", "step 1"]
        )
