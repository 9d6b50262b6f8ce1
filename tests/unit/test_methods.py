"""The benchmark of methods: its bytes follow from the shapes, and all that it times trains the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP takes no bytes there, which qlora needs")

ROOT = Path(__file__).parents[2]
LAYER = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
"""Numbers in the linear layers of one of the 16 layers."""
ROWS = 2 * (2048 + 512) + 2 * 8192 + 2048
"""Rows of them, each of which has two scales of its own."""


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "methods.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.methods", *arguments, "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=500)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_the_bytes_of_a_1b_are_those_of_its_shapes(tmp_path: Path) -> None:
    found = run(tmp_path, "--rounds", "0", "--passes", "0")["bytes"]
    norms = 33 * 2048
    linear, others = 16 * LAYER, 128_256 * 2048 + norms
    adapters = 16 * 16 * (2 * 4096 + 2 * 2560 + 3 * 10_240)
    last = 2 * (LAYER + 2 * 2048)
    scales = linear // 64 + 16 * 8 * ROWS
    scales16 = 2 * (linear // 64) + 16 * 4 * ROWS
    expected = {
        "full": (linear + others, 4 * (linear + others), 12 * (linear + others)),
        "freeze": (last, 2 * (linear + others) + 2 * last, 2 * (linear + others) + 10 * last),
        "lora": (adapters, 2 * (linear + others) + 4 * adapters, 12 * adapters),
        "qlora nf4": (adapters, linear // 2 + scales + 2 * others + 4 * adapters, 12 * adapters),
        "qlora int8": (adapters, linear + scales16 + 2 * others + 4 * adapters, 12 * adapters),
    }
    steps = 16 * 7 * 2 * 4  # the optimizer counts its steps for each of the tensors, in a number of 4 bytes
    for name, (trained, weights, checkpoint) in expected.items():
        one, eight = found[name]["1"], found[name]["8"]
        assert (one["trained"], one["weights"]) == (trained, weights), name
        assert one["gradients"] == 4 * trained
        assert 0 <= one["optimizer"] - 8 * trained <= steps
        assert 0 <= one["checkpoint"] - checkpoint <= steps
        # Everything has rows that eight ranks divide.
        assert [eight[part] * 8 for part in ("weights", "gradients")] == [one["weights"], one["gradients"]], name
    base = found["qlora nf4"]["8"]["weights"] - adapters * 4 / 8 - 2 * others / 8
    assert base <= 0.6 * linear / 8 and (found["lora"]["8"]["weights"] - adapters / 2) * 8 <= 2.05 * (linear + others)
    stated = (ROOT / "docs" / "results.md").read_text().partition("## Bytes of a method")[2].partition("\n## ")[0]
    for name, worlds in found.items():
        for row in worlds.values():
            cells = " | ".join(
                f"{row[part] / 2**20:,.1f}" for part in ("weights", "gradients", "optimizer", "checkpoint")
            )
            assert f"| {cells} |" in stated, name


@pytest.mark.slow
def test_what_is_timed_trains_the_same(tmp_path: Path) -> None:
    """The script fails where losses differ; what a tiny network takes says nothing."""
    found = run(tmp_path, "--size", "tiny", "--rounds", "1", "--steps", "1", "--passes", "1")
    assert {"ours", "PEFT, bare loop"} <= found["lora"].keys()
    assert found["methods_ms_per_token"].keys() == found["bytes"].keys()
    assert all(value > 0 for value in found["methods_ms_per_token"].values())
