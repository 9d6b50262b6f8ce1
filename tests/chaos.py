"""Chaos: a run on a cluster of this machine, to which something happens every minute, and what became of it.

    make chaos SECONDS=600 SEED=1

Every fault is drawn by the seed: 60 s after the last one, or 10 s after the first step that follows it, whichever is
later. In the end the run is stopped, and compared with the same run undisturbed: the samples of every step are equal,
the losses to rounding. Exits with 1 if they are not, if anything had to be done by hand, or if anything is left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.tracking.jsonl import read_metrics, read_trajectory
from tests.metadata import Server, serving
from tests.ray.jobs import Command, Nodes, config_of, events
from tests.runs import trajectory

PAUSE_SECONDS, AFTER_STEP_SECONDS = 60.0, 10.0
RECOVERY_SECONDS = 240.0
"""How long the run may take to train again; then somebody would have to look at it."""
EVERY = 10
BARE_RECOVERY_SECONDS = 17.8
"""Of bare Ray Train after the loss of a rank: benchmarks/results/startup.json, median."""
OURS = ("RayTrainWorker", "_Board", "TrainController", "_NodeWatch", "SplitCoordinator")
"""Processes that end with the run."""
NAMES = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Chaos:
    directory: Path
    nodes: Nodes
    spot: Server
    config: FinetuneConfig
    random: random.Random
    run: Command
    living: list[str] = field(default_factory=list)
    added: int = 0
    done: list[dict[str, Any]] = field(default_factory=list)

    # --- Faults: each does it, and says what -------------------------------------------------------------------------

    def worker_kill(self) -> str:
        rank = self.random.choice(self.ranks())
        psutil.Process(rank["pid"]).kill()
        return f"rank {rank['rank']} killed"

    def rank_stop(self) -> str:
        rank = self.random.choice(self.ranks())
        psutil.Process(rank["pid"]).send_signal(signal.SIGSTOP)
        return f"rank {rank['rank']} stopped"

    def node_removal(self) -> str:
        if len(self.living) < 2:
            return self.node_addition()
        name = self.living.pop(self.random.randrange(len(self.living)))
        self.nodes.remove(name)
        return f"node {name} removed"

    def node_addition(self) -> str:
        name = NAMES[self.added % 26] + str(self.added // 26)
        self.added += 1
        self.nodes.add(name)
        self.living.append(name)
        return f"node {name} added"

    def drain(self) -> str:
        if len(self.living) < 2:
            return self.node_addition()
        name = self.living.pop(self.random.randrange(len(self.living)))
        self.nodes.drain(name, 20)
        return f"node {name} drained in 20 s"

    def storage_error(self) -> str:
        (self.run.faults / "storage-error").touch()
        return "the storage of checkpoints fails for 15 s"

    def driver_kill(self) -> str:
        self.run.process.kill()
        self.run.process.wait()
        self.run = Command(self.config, self.directory, RAY_ADDRESS=self.nodes.address, RAY_AUTH_MODE="disabled")
        return "the driver killed, and the same command again"

    def board_kill(self) -> str:
        return self.kill("_Board")

    def controller_kill(self) -> str:
        return self.kill("TrainController")

    def coordinator_kill(self) -> str:
        return self.kill("SplitCoordinator")

    def builder_kill(self) -> str:
        """The actor of Ray Data that builds and reads windows."""
        return self.kill("ReadStream")

    # --- Around them -------------------------------------------------------------------------------------------------

    def kill(self, what: str) -> str:
        found = self.of_ray(what)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return f"{len(found)} of {what} killed"

    def of_ray(self, what: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.nodes.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, IndexError):
                if process.cmdline()[0].startswith(f"ray::{what}"):
                    found.append(process)
        return found

    def ranks(self) -> list[dict[str, Any]]:
        joined: list[dict[str, Any]] = events(self.run.run_dir, "ranks_joined")[-1]["fields"]["ranks"]
        return joined

    def strike(self) -> None:
        kinds: list[Callable[[], str]] = [
            self.worker_kill, self.rank_stop, self.node_removal, self.node_addition, self.drain, self.storage_error,
            self.driver_kill, self.board_kill, self.controller_kill, self.coordinator_kill, self.builder_kill,
        ]  # fmt: skip
        began = time.monotonic()
        steps = self.run.steps()
        what = self.random.choice(kinds)()
        print(f"{time.strftime('%H:%M:%S')} after step {steps}: {what}", flush=True)
        self.settle(steps)
        (self.run.faults / "storage-error").unlink(missing_ok=True)
        seconds = time.monotonic() - began
        self.done.append({"fault": what, "after_step": steps, "seconds": round(seconds, 1)})

    def settle(self, steps: int) -> None:
        """Wait until the run has trained further, and ten seconds more."""
        time.sleep(AFTER_STEP_SECONDS)
        (self.run.faults / "storage-error").unlink(missing_ok=True)
        self.run.until(lambda: self.run.steps() > steps + 2, RECOVERY_SECONDS)
        time.sleep(AFTER_STEP_SECONDS)


def config_for(directory: Path) -> FinetuneConfig:
    return config_of(
        directory,
        train={"global_batch": 10, "micro_batch": 2, "max_steps": 100_000},
        optim={"lr": 1e-3, "schedule_steps": 100_000, "warmup_steps": 10},
        parallel={"precision": "fp64"},
        checkpoint={"every": EVERY, "keep_last": 3},
        cluster={
            "launch": "ray", "workers": {"min": 1, "max": 3}, "device": "cpu", "gpus_per_worker": 1,
            "max_failures": -1, "hang_minutes": 0.25, "wait_minutes": 5,
        },
        tracking={"console": False, "mlflow": {"enabled": True}},
    )  # fmt: skip


def wreak(directory: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The chaos. Returns what was done, what was trained, and what is left."""
    config = config_for(directory)
    with serving() as spot, Nodes(directory, head_cpus=1) as nodes:
        run = Command(config, directory, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")
        (run.faults / "pace").write_text("0.2")
        chaos = Chaos(directory, nodes, spot, config, random.Random(seed), run)
        for _ in range(3):
            chaos.node_addition()
        began = time.monotonic()
        chaos.settle(0)
        while time.monotonic() - began < seconds:
            struck = time.monotonic()
            chaos.strike()
            time.sleep(max(0.0, PAUSE_SECONDS - (time.monotonic() - struck)))
        took = time.monotonic() - began
        chaos.run.process.send_signal(signal.SIGTERM)
        code, said = chaos.run.end(120)
        time.sleep(5)
        left = [what for what in OURS for _ in chaos.of_ray(what)]
    return {
        "faults": chaos.done,
        "seconds": took,
        "code": code,
        "said": said,
        "left": left,
        "run_dir": chaos.run.run_dir,
    }


def judge(found: dict[str, Any], directory: Path) -> list[str]:
    """What is not as it should be; prints the rest."""
    steps = read_trajectory(found["run_dir"] / "metrics.jsonl")
    config = config_for(directory).model_dump()
    config["run"]["name"] = "whole"
    config["train"]["max_steps"] = len(steps)
    config["cluster"] |= {"launch": "local", "workers": 2, "gpus_per_worker": "auto"}
    config["tracking"]["mlflow"]["enabled"] = False
    whole = trajectory(FinetuneConfig.model_validate(config), 2)
    problems = [] if found["code"] == 130 else [f"the command ended with {found['code']}: {found['said'][-2000:]}"]
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        problems.append("the record has not every step once")
    if [step["samples"] for step in steps] != [step["samples"] for step in whole]:
        problems.append("other samples")
    off = max(abs(mine["loss"] / theirs["loss"] - 1) for mine, theirs in zip(steps, whole, strict=True))
    if off > 1e-8:
        problems.append(f"a loss is off by {off:.1e}")
    if found["left"]:
        problems.append(f"left behind: {found['left']}")
    pace = median(
        line["step_seconds"] for line in read_metrics(found["run_dir"] / "metrics.jsonl") if "step_seconds" in line
    )
    ours = len(steps) * pace / found["seconds"]
    faults = len(found["faults"])
    lost = faults * (BARE_RECOVERY_SECONDS + EVERY / 2 * pace)
    bare = max(0.0, 1 - lost / found["seconds"])
    print(
        f"{faults} faults in {found['seconds']:.0f} s, {len(steps)} steps of {pace:.2f} s; largest difference {off:.1e}"
    )
    print(f"productive {ours:.0%}; bare Ray Train, had it recovered from each: at most {bare:.0%}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        found = wreak(Path(name), arguments.seconds, arguments.seed)
        problems = judge(found, Path(name))
    if arguments.out is not None:
        kept = {key: value for key, value in found.items() if key not in ("said", "run_dir")}
        arguments.out.write_text(json.dumps(kept | {"problems": problems}, indent=1))
    for problem in problems:
        print(problem)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
