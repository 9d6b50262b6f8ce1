"""How a command leaves a process that Python cannot end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MAIN = """
import atexit, sys
from raytune_fsdp.base.leaving import crashing
from raytune_fsdp.cli.train import main
atexit.register(print, "Python ends")
crashing.extend(sys.argv[1:])
print("said before", end="")
sys.exit(main(["--config", "nowhere.yaml"]))
"""


@pytest.mark.parametrize("crashing", [[], ["Ray"]])
def test_a_command_leaves_at_once_where_a_library_would_crash(crashing: list[str]) -> None:
    """With all that it has said, and its own exit code."""
    done = subprocess.run([sys.executable, "-c", MAIN, *crashing], capture_output=True, text=True)
    assert done.returncode == 2 and "error: " in done.stderr and "nowhere.yaml" in done.stderr
    assert done.stdout == ("said before" if crashing else "said beforePython ends\n")


def test_what_cannot_be_said_does_not_keep_it() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "Ray"], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
