"""The installation that `make demo` and the images share, into an empty place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMAGE, BASE = 2.0e9, 0.13e9
"""At most so large is the image for CPUs, with what it begins with (python:3.12-slim, unpacked)."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow  # minutes: all packages are installed anew
@pytest.mark.timeout(1500)
def test_an_empty_place_gets_what_the_lock_says_and_runs_the_demo(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    environment = {**os.environ, "PYTHON": sys.executable, "LEAN": "cpu"}  # as for the image
    done = subprocess.run(
        [ROOT / "docker" / "install.sh", prefix, "all"], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    listed = subprocess.run(
        [prefix / "bin" / "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    ).stdout
    installed = {normal(each["name"]): each["version"].partition("+")[0] for each in json.loads(listed)}
    lock = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines())
    locked = {normal(name): version for name, version in lock.items()}
    ours = {name: version for name, version in installed.items() if name not in ("pip", "setuptools", "raytune-fsdp")}
    assert ours == {name: locked.get(name) for name in ours}
    size = sum(file.stat().st_size for file in prefix.rglob("*") if file.is_file() and not file.is_symlink())
    print(f"\n{size / 1e9:.2f} GB in {len(installed)} packages")
    assert size < IMAGE - BASE, "estimated, as nothing here builds images"
    program = prefix / "bin" / "raytune-fsdp"
    demo = subprocess.run(
        [program, "train", "--config", "demo", "--train.epochs", "2", "--cluster.launch", "local"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert demo.returncode == 0, demo.stderr[-2000:]
    assert "next:" in demo.stdout
