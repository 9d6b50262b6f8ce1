"""Every benchmark of a CPU starts, and comes to its end with little to do; those of a GPU are started by their own plan
(test_evidence.py)."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
Done = subprocess.CompletedProcess[str]
Started = Mapping[str, tuple[Future[Done], Path]]

TINY = {
    "startup": "--rounds 1 --workers 1",
    "stream": "--rows 600 --datasets 20 --steps 7",
    "duplicates": "--rows 64 --rounds 1",
    "end_to_end": "--steps 11 --seq-len 128 --workers 1 --bytes 1000000",
    "load": "--rounds 1 --layers 1 --worlds 2 --ways sharded",
    "fp8": "--rates recipe --seeds 7 --steps 4 --alone",
    "optimizers": "--seeds 7 --epochs 1",
    "planned_time": '--only "tiny, alone"',
    "attention": "--rounds 1",
    "chat_rows": "--rounds 1",
    "checkpoint": "--rounds 1 --layers 1 --width 64",
    "data_memory": "--gigabytes 0.002",
    "export": "--rounds 1 --layers 1",
    "hf_trainer_curve": "--steps 2 --plot {directory}/curve.png",
    "known_figures": "",
    "loss": "--rounds 1 --vocabulary 4000",
    "memory": "--size 1b --seq-len 512 --modes none",
    "methods": "--rounds 0 --passes 0",
    "packing": "--documents 100 --texts 20 --rounds 1",
    "planned_memory": '--only "tiny, alone"',
    "productive": "",
    "published_speed": "--only qwen3-0.6b/1xRTX-A6000/8192",
    "recompute": "--rounds 1",
    "step": "--rounds 1 --steps 1",
}
"""The least that each can do."""

NEEDS = {
    "end_to_end": ("ray", "accelerate"), "fp8": ("torchao",), "hf_trainer_curve": ("accelerate", "matplotlib"),
    "load": ("accelerate",), "methods": ("peft",), "packing": ("trl",), "planned_memory": ("peft",),
    "planned_time": ("peft",), "startup": ("ray",), "step": ("accelerate", "mlflow"), "stream": ("ray",),
}  # fmt: skip
"""What none of our own dependencies brings, or only an extra."""

JUDGED = ("fp8", "hf_trainer_curve", "optimizers", "planned_memory", "planned_time")
"""Those that end with 1 where a figure is not what it should be, which so little work does not tell."""


def is_command(path: Path) -> bool:
    statements = ast.parse(path.read_text()).body
    return any(isinstance(each, ast.If) and "__main__" in ast.unparse(each.test) for each in statements)


def test_every_benchmark_is_started_by_a_test() -> None:
    """But for the two that others start."""
    commands = {path.stem for path in BENCHMARKS.glob("*.py") if is_command(path)}
    assert commands - {"bare_hf_trainer", "bare_ray_train"} == TINY.keys()


def run(name: str, directory: Path) -> Done:
    arguments = shlex.split(TINY[name].format(directory=directory))
    out = "--result" if name == "packing" else "--out"
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *arguments, out, str(directory / "out.json")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Those that are asked for: one of Ray's at a time, and another one meanwhile."""
    items: list[Any] = [item for item in request.session.items if "started" in getattr(item, "fixturenames", ())]
    asked = {item.callspec.params["name"] for item in items}
    ready = [name for name in TINY if name in asked and all(map(find_spec, NEEDS.get(name, ())))]
    places = {name: tmp_path_factory.mktemp(name) for name in ready}
    with ThreadPoolExecutor(1) as on_ray, ThreadPoolExecutor(1) as others:
        threads = {name: on_ray if "ray" in NEEDS.get(name, ()) else others for name in ready}
        yield {name: (threads[name].submit(run, name, place), place) for name, place in places.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_comes_to_its_end(name: str, started: Started) -> None:
    if name not in started:
        pytest.skip(f"one of {', '.join(NEEDS[name])} is not installed")
    future, place = started[name]
    done = future.result()
    assert done.returncode in ((0, 1) if name in JUDGED else (0,)), done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert json.loads((place / "out.json").read_text())["cores"] == os.cpu_count()
