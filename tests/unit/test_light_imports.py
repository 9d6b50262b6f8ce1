"""What an import pulls in: a command is there at once, a node's processes are small, and a rank greets the driver
before it loads what takes seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "pyarrow", "pydantic", "psutil", "mlflow", "datasets", "peft", "numpy")
NOTHING, CONFIG = "", "pydantic"
ROWS = "pyarrow pydantic numpy"
ACTOR = "ray psutil"  # without Ray Train
RAY = "ray pyarrow pydantic psutil numpy"
ENTRIES: dict[str, tuple[str, int]] = {
    "raytune_fsdp": (NOTHING, 20),
    "raytune_fsdp.base.errors": (NOTHING, 20),
    "raytune_fsdp.base.batch": (NOTHING, 20),
    "raytune_fsdp.base.measured": (NOTHING, 20),
    "raytune_fsdp.config": (CONFIG, 50),
    "raytune_fsdp.plan.plan": (CONFIG, 50),
    "raytune_fsdp.run.checks": (CONFIG, 50),
    "raytune_fsdp.convert.file": (CONFIG, 50),
    "raytune_fsdp.tune": (NOTHING, 20),
    "raytune_fsdp.tune.turn": (CONFIG, 50),
    "raytune_fsdp.record.jsonl": (NOTHING, 30),
    "raytune_fsdp.checkpoint.manifest": (NOTHING, 30),
    "raytune_fsdp.checkpoint.catalogue": (NOTHING, 30),
    "raytune_fsdp.record.report.page": ("pydantic numpy", 70),
    "raytune_fsdp.data.windows": (ROWS, 110),
    "raytune_fsdp.data.stream": (ROWS, 110),
    "raytune_fsdp.launch.shared_storage": (NOTHING, 30),
    "raytune_fsdp.launch.ray.nodes.spot": (CONFIG, 50),
    "raytune_fsdp.launch.importing": (NOTHING, 20),
    "raytune_fsdp.launch.ray.session": (f"{ACTOR} pydantic", 120),
    "raytune_fsdp.launch.ray.board": (ACTOR, 110),
    "raytune_fsdp.launch.ray.nodes.node_watch": (f"{ACTOR} pydantic", 120),
    "raytune_fsdp.launch.ray.rank": (RAY, 230),
    "raytune_fsdp.launch.ray.tasks.stream": (RAY, 230),
    "raytune_fsdp.tools.doctor.node": (NOTHING, 30),
    "raytune_fsdp.tools.doctor.deadline": (NOTHING, 20),
}
"""What each imports of HEAVY, and the most memory in MiB that a process has then: a fifth to a half more than measured
(12 for the package, 35 with pydantic, 86 with pyarrow, 81 with Ray, 183 with Ray Train)."""
WITH_PYDANTIC = {"train", "fork", "data", "audit", "eval", "step", "watch", "progress", "screen"}
COMMANDS = [file.stem for file in (ROOT / "raytune_fsdp" / "cli").glob("[a-z]*.py")]


def imported_by(*modules: str, heavy: Sequence[str] = HEAVY) -> tuple[set[str], int]:
    """What a process has loaded of `heavy` after these imports, and its MiB."""
    code = f"import {', '.join(modules)}, sys, pathlib\n"
    code += f"print(*[each for each in {tuple(heavy)} if each in sys.modules])\n"
    # Not getrusage: its peak begins with that of the process that forked this one.
    code += "status = pathlib.Path('/proc/self/status')\n"
    code += "print(status.read_text().split('VmHWM:')[1].split()[0] if status.exists() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    names, peak = done.stdout.split("\n")[:2]
    return set(names.split()), int(peak) // 1024


@pytest.mark.parametrize("most", dict.fromkeys(ENTRIES.values()), ids=lambda most: f"{most[0] or 'nothing'}-{most[1]}")
def test_importing_them_is_light(most: tuple[str, int]) -> None:
    """All that may bring the same, in one process: together they bring no less than each of them."""
    names, mib = most
    if "ray" in names and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    modules = [name for name, its in ENTRIES.items() if its == most]
    found, peak = imported_by(*modules)
    good = found == set(names.split()) and peak <= mib
    assert good, {name: imported_by(name) for name in modules}


SOME = {"mlflow", "datasets", "peft", "matplotlib", "sklearn", "lm_eval", "bitsandbytes"}


def loaded_by_a_rank() -> set[str]:
    import raytune_fsdp.launch.ray.driver
    import raytune_fsdp.launch.worker  # noqa: F401

    return {"torch", *SOME} & sys.modules.keys()


def test_a_rank_and_the_driver_load_only_what_every_run_needs() -> None:
    """torch and transformers bring a lot themselves: sympy, scipy, Dynamo, torchao. All else is for some runs. Of the
    server of ranks they have torch, transformers and a part of this package."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    assert run_ranks(loaded_by_a_rank, 1) == [{"torch"}]


def test_commands_are_there_at_once() -> None:
    """All that need no config in one process; what they work with, each imports when it works."""
    light = [f"raytune_fsdp.cli.{name}" for name in COMMANDS if name not in WITH_PYDANTIC]
    assert len(light) >= 15
    assert imported_by(*light)[0] == set()
    assert imported_by(*[f"raytune_fsdp.cli.{name}" for name in WITH_PYDANTIC])[0] == {"pydantic"}


def test_completing_needs_no_library_but_pydantic() -> None:
    code = "from raytune_fsdp.cli.main import main; assert main(['completion', 'bash']) == 0\n"
    code += f"import sys; print(*[each for each in {HEAVY} if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "pydantic"
