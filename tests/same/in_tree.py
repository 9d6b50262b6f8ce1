"""One tree trains a list of runs, and runs a list of commands. Started with PYTHONPATH naming the tree; uses only its
public names.

    python -P tests/same/in_tree.py JOBS

JOBS is a JSON file: of each run its config, the number of processes to start as torchrun would (0: none, the launcher
of the tree starts the ranks), where to write what goes wrong, and, if it goes on with another run's checkpoint, that
run's directory and the step; of each command its line, and where to write what it prints. All have processes of their
own, forked from this one, which has imported everything.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import pkgutil
import shutil
import socket
import sys
import traceback
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any


def main(jobs: str) -> None:
    import_everything()
    for job in json.loads(Path(jobs).read_text()):
        if "command" in job:
            process = mp.get_context("fork").Process(target=command, args=(job["command"], job["out"]))
            process.start()
            process.join()
            continue
        try:
            if job["begun"] is not None:
                take_over(job)
            start(job)
        except Exception:
            report(job)


def import_everything() -> None:
    """Once for all runs: the package by walking it, since its modules have other names in other trees, and what it
    imports late."""
    import raytune_fsdp

    tree = os.environ["PYTHONPATH"]
    assert Path(raytune_fsdp.__file__).is_relative_to(tree), f"{raytune_fsdp.__file__} is not of the tree {tree}"
    found = [each.name for each in pkgutil.walk_packages(raytune_fsdp.__path__, "raytune_fsdp.", onerror=print)]
    ours = [name for name in found if not {"ray", "mlflow"} & set(name.replace("_", ".").split("."))]
    for name in (*ours, "pandas", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        with suppress(ImportError):
            importlib.import_module(name)


def command(line: list[str], out: str) -> None:
    """What it prints, and its exit code."""
    from raytune_fsdp.cli.main import main

    with open(out, "w") as file, redirect_stdout(file):
        code = main(line)
        print(f"exit code {code}")


def start(job: dict[str, Any]) -> None:
    """Train, in processes that are gone afterwards."""
    world = job["torchrun"]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)] or [{}]
    processes = [mp.get_context("fork").Process(target=train, args=(job, place)) for place in places]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"the processes ended with {[process.exitcode for process in processes]}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def train(job: dict[str, Any], place: dict[str, str]) -> None:
    from raytune_fsdp import FinetuneConfig, finetune

    os.environ.update(place)
    try:
        result = finetune(FinetuneConfig.model_validate(job["config"]))
        first = 0 if job["begun"] is None else job["from_step"]
        assert result.trained == result.steps - first, f"it has trained {result.trained} of {result.steps} steps"
    except BaseException:
        report(job)
        raise


def report(job: dict[str, Any]) -> None:
    """The exception, unless another rank was first."""
    with suppress(FileExistsError), open(job["error"], "x") as file:
        traceback.print_exc(file=file)


def take_over(job: dict[str, Any]) -> None:
    """Copy a run as it was when it died some steps after its checkpoint of this step."""
    begun, step, run = Path(job["begun"]), job["from_step"], job["config"]["run"]
    checkpoints = Path(run["storage"]) / run["name"] / "checkpoints"
    shutil.copytree(begun, checkpoints.parent)
    saved = {each: int(each.name.removeprefix("step-").partition(".")[0]) for each in checkpoints.glob("step-*")}
    assert step in saved.values(), f"{begun} has no checkpoint of step {step}: {sorted(saved.values())}"
    for each, at in saved.items():
        if at > step:
            shutil.rmtree(each)


if __name__ == "__main__":
    main(sys.argv[1])
