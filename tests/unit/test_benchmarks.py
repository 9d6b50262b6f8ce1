"""Every benchmark of a CPU starts, and comes to its end with little to do; those of a GPU are started by their own plan
(test_evidence.py)."""

from __future__ import annotations

import ast
import json
import multiprocessing as mp
import os
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import PRELOAD

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
Started = Mapping[str, tuple[Future[int | None], Path]]

TINY = {
    "startup": "--rounds 1 --workers 1 --settle 0 --warm --faults driver",
    "stream": "--rows 600 --datasets 20 --steps 7 --micro-batches 8",
    "digests": "--rounds 1 --worlds 1",
    "duplicates": "--rows 64 --rounds 1",
    "end_to_end": "--steps 11 --seq-len 128 --workers 1 --bytes 1000000 --warm",
    "load": "--rounds 1 --layers 1 --worlds 2 --ways sharded",
    "fp8": "--rates third --kinds rowwise --seeds 7 --steps 4 --alone",
    "optimizers": "--seeds 7 --epochs 1 --kinds 8bit",
    "planned_time": '--only "tiny, alone" --calibrations {directory}',
    "same_bits": "--rounds 1 --worlds 2",
    "checkpoint_index": "--ranks 4 --layers 1 --older",
    "attention": "--rounds 1 --lengths 256 512",
    "chat_rows": "--rounds 1 --rows 32",
    "long_conversations": "--rounds 1 --turns 20 --base .",
    "checkpoint": "--rounds 1 --layers 1 --width 64 --no-process",
    "data_memory": "--gigabytes 0.002",
    "export": "--rounds 1 --layers 1",
    "hf_trainer_curve": "--steps 2 --launch local --plot {directory}/curve.png",
    "hybrids": "--rounds 1 --steps 1 --only lfm2",
    "kernels": "--only LoRA",
    "known_figures": "--only of_traffic of_180b",
    "loss": "--rounds 1 --vocabulary 4000",
    "memory": "--size 1b --seq-len 512 --modes none",
    "methods": "--size tiny --rounds 1 --passes 1 --steps 1",
    "packing": "--documents 100 --texts 20 --rounds 1",
    "peers": "--worlds 2 --rounds 1 --seconds 2",
    "planned_memory": '--only "tiny, alone"',
    "planned_sorts": "--only LoRA",
    "preferences": "--rounds 1 --pairs 6 --batches 2",
    "productive": "",
    "published_speed": "--only qwen3-0.6b/1xRTX-A6000/8192",
    "recompute": "--rounds 1 --length 256",
    "step": "--rounds 1 --steps 1 --seq-len 32",
    "sweep": "--rounds 1 --trials 2 --settle 0 --warm",
    "updates": "--only Lion",
}
"""The least that each can do."""

NEEDS = {
    "end_to_end": ("ray", "accelerate"), "fp8": ("torchao",), "hf_trainer_curve": ("accelerate", "matplotlib"),
    "kernels": ("peft",), "load": ("accelerate",), "methods": ("peft",), "packing": ("trl",),
    "peers": ("ray",), "planned_memory": ("peft",), "planned_sorts": ("peft",), "planned_time": ("peft",),
    "preferences": ("trl",), "startup": ("ray",),
    "step": ("accelerate", "mlflow"), "stream": ("ray",), "sweep": ("ray",),
}  # fmt: skip
"""What none of our own dependencies brings, or only an extra."""

JUDGED = ("fp8", "hf_trainer_curve", "optimizers", "planned_memory", "planned_time")
"""Those that end with 1 where a figure is not what it should be, which so little work does not tell."""


def is_command(path: Path) -> bool:
    statements = ast.parse(path.read_text()).body
    return any(isinstance(each, ast.If) and "__main__" in ast.unparse(each.test) for each in statements)


def test_every_benchmark_is_started_by_a_test() -> None:
    """But for those that others start."""
    commands = {path.stem for path in BENCHMARKS.glob("*.py") if is_command(path)}
    assert commands - {"bare_hf_trainer", "bare_ray_train", "bare_tune"} == TINY.keys()


def run(name: str, directory: Path) -> int | None:
    """Its exit code, of a process that is forked from one that has imported torch and transformers; none in time."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=command, args=(name, directory))
    process.start()
    process.join(500)  # sweep takes 170 s alone here, and 300 and more next to another one that starts Ray
    ended = process.exitcode
    process.kill()
    process.join()
    return ended


def command(name: str, directory: Path) -> None:
    """As `python -m benchmarks.NAME` does it."""
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    warnings.filterwarnings("ignore")
    if name == "planned_time":  # to measure this machine takes half a minute, and has a test of its own
        from raytune_fsdp.predict.devices import write_calibration
        from tests.unit.test_calibration import MADE

        write_calibration(replace(MADE, ranks=1), directory / "ranks-1.json")
    out = "--result" if name == "packing" else "--out"
    sys.argv = [name, *shlex.split(TINY[name].format(directory=directory)), out, str(directory / "out.json")]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Those that are asked for, two at a time, and first those that start Ray: they take a minute each, half of which
    they wait."""
    items: list[Any] = [item for item in request.session.items if "started" in getattr(item, "fixturenames", ())]
    asked = {item.callspec.params["name"] for item in items}
    ready = [name for name in TINY if name in asked and all(map(find_spec, NEEDS.get(name, ())))]
    ready.sort(key=lambda name: "ray" not in NEEDS.get(name, ()))
    places = {name: tmp_path_factory.mktemp(name) for name in ready}
    with ThreadPoolExecutor(2) as threads:
        yield {name: (threads.submit(run, name, place), place) for name, place in places.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_comes_to_its_end(name: str, started: Started) -> None:
    if name not in started:
        pytest.skip(f"one of {', '.join(NEEDS[name])} is not installed")
    future, place = started[name]
    code = future.result()
    printed = (place / "log").read_text(errors="replace")
    assert code in ((0, 1) if name in JUDGED else (0,)), printed[-3000:]
    assert "Traceback" not in printed, printed[-3000:]
    assert json.loads((place / "out.json").read_text())["cores"] == os.cpu_count()
