"""A run on a cluster of this machine that is disturbed on purpose, and whether it is still the run of one rank that
nobody disturbs. tests/chaos.py and tests/kills.py say what happens to it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_events, read_metrics
from raytune_fsdp.record.names import SAVED
from tests.ray.jobs import ROOT, TEMPORARY, Command, Nodes, Pipe, config_of, events
from tests.runs import trajectory

RECOVERY_SECONDS = 240.0
"""How long the run may take to train again; then somebody would have to look at it."""
KEEPER = "_Keeper"
"""The actor of a node that keeps peer copies."""
OURS = ("RayTrainWorker", "_Board", "TrainController", "_NodeWatch", "SplitCoordinator", KEEPER)
"""Ray's processes that end with the run."""
LIVE_ON = ("_Board", "_NodeWatch", KEEPER)
"""Those that live longer than an attempt, besides the driver."""
TEMPLATE = "raytune_fsdp/launch/ray/forked/template.py"
"""The program of the processes that others are forked from."""
GROUPS = """
import ray
ray.init(namespace="disturbed", log_to_driver=False)
groups = ray.util.placement_group_table().values()
print(sum(each["state"] != "REMOVED" for each in groups))
"""
ONE_POOL = {"MALLOC_ARENA_MAX": "1"}
"""A setting of glibc for the driver. Without it each thread gets a pool of its own, and the driver grew by 2 MiB with
each of its first ten attempts, then hardly any more. With a single pool it is 0.2 MiB with each: what it keeps."""
MOST_GROWTH = 1 << 20
"""Bytes by which a process may grow from one attempt to the next."""


@dataclass
class Disturbed:
    directory: Path
    config: FinetuneConfig
    nodes: Nodes
    random: random.Random
    pipe: Pipe | None = None
    tree: Path = ROOT
    """The checkout whose code runs."""
    living: dict[str, str] = field(default_factory=dict)
    """Ray's names of the nodes, by ours."""
    added: int = 0
    run: Command = field(init=False)
    memory: Memory = field(default_factory=lambda: Memory())
    shared: set[Path] = field(default_factory=set)
    """Shared memory that its processes had."""

    def start(self) -> None:
        """The command; again, if it was given before."""
        self.run = Command(
            self.config, self.directory,
            pipe=self.pipe, tree=self.tree, RAY_ADDRESS=self.nodes.address, RAY_AUTH_MODE="disabled", **ONE_POOL,
        )  # fmt: skip

    def add_node(self) -> str:
        self.added += 1
        name = f"n{self.added}"
        self.living[name] = self.nodes.add(name)
        return name

    def of_ray(self, what: str) -> list[psutil.Process]:
        return self.those(lambda command: command[0].startswith(f"ray::{what}"))

    def templates(self) -> list[psutil.Process]:
        return self.those(lambda command: TEMPLATE in command)

    def those(self, are: Callable[[list[str]], bool]) -> list[psutil.Process]:
        """Processes of the cluster, by their command lines."""
        found = []
        for process in psutil.Process(self.nodes.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, IndexError):
                if are(process.cmdline()):
                    found.append(process)
        return found

    def kill(self, what: str) -> str:
        found = self.of_ray(what)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return f"{len(found)} of {what} killed"

    def ranks(self) -> list[dict[str, Any]]:
        joined: list[dict[str, Any]] = events(self.run.run_dir, "ranks_joined")[-1]["fields"]["ranks"]
        return joined

    def attempt(self) -> int:
        """The number of attempts that have trained."""
        return len(events(self.run.run_dir, "first_step"))

    def look(self) -> None:
        """At the memory of its processes; once for each attempt that has trained."""
        driver = psutil.Process(self.run.process.pid)
        of_cluster = {what: self.of_ray(what) for what in LIVE_ON}
        self.memory.look(self.attempt(), {"driver": [driver], "template": self.templates(), **of_cluster})
        for process in [driver, *psutil.Process(self.nodes.pid).children(recursive=True)]:
            with suppress(OSError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if " /dev/shm/" in line and not line.endswith("(deleted)"):
                        self.shared.add(Path("/" + line.partition(" /")[2]))

    def shared_left(self) -> list[str]:
        """Shared memory that is still there, once the cluster has ended, too."""
        return [str(path) for path in sorted(self.shared) if path.exists()]

    def groups(self) -> int:
        """Placement groups that there are."""
        environment = {**os.environ, "RAY_ADDRESS": self.nodes.address, "RAY_AUTH_MODE": "disabled"}
        asked = subprocess.run(
            [sys.executable, "-c", GROUPS], env=environment, capture_output=True, text=True, check=True
        )
        return int(asked.stdout.strip().splitlines()[-1])

    def those_of_run(self) -> list[str]:
        """What there is of its processes on the cluster."""
        return [*(what for what in OURS for _ in self.of_ray(what)), *("template" for _ in self.templates())]

    def left_behind(self, seconds: float) -> list[str]:
        """Processes and locks of the run, and files in temporary directories, so long after its end at most."""
        deadline = time.monotonic() + seconds
        while (those := self.those_of_run()) and time.monotonic() < deadline:
            time.sleep(1)
        run = self.run.run_dir
        return [
            *those,
            *(str(path) for pattern in ("lock*", ".shared-*", "checkpoints/*.tmp") for path in run.glob(pattern)),
            # But for torch's cache, which all its processes share.
            *(str(path) for path in TEMPORARY.iterdir() if not path.name.startswith("torchinductor_")),
        ]


class Memory:
    """What the processes that outlive attempts have to themselves, after each attempt's first steps."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, float], dict[int, int]] = {}
        """By name, process and its start: bytes by attempt."""

    def look(self, attempt: int, processes: dict[str, list[psutil.Process]]) -> None:
        for what, those in processes.items():
            for process in those:
                with suppress(psutil.NoSuchProcess, OSError):
                    key = (what, process.pid, process.create_time())
                    self.found.setdefault(key, {}).setdefault(attempt, own_bytes(process.pid))

    def growth(self) -> dict[str, float]:
        """Bytes from one attempt to the next, of each process that has seen five or more of them; the first two warm
        it up. Of several processes of one kind the fastest counts."""
        grown: dict[str, float] = {}
        for (what, *_), by_attempt in self.found.items():
            points = sorted(by_attempt.items())[2:]
            if len(points) >= 3:
                pairs = combinations(points, 2)
                slopes = [(size - before) / (attempt - first) for (first, before), (attempt, size) in pairs]
                grown[what] = max(median(slopes), grown.get(what, float("-inf")))
        return grown

    def problems(self) -> list[str]:
        return [
            f"{what} grows by {bytes_ / 2**20:.1f} MiB with each attempt"
            for what, bytes_ in self.growth().items()
            if bytes_ > MOST_GROWTH
        ]

    def record(self) -> list[dict[str, Any]]:
        return [
            {"process": what, "mebibytes": {attempt: round(size / 2**20, 1) for attempt, size in by_attempt.items()}}
            for (what, *_), by_attempt in self.found.items()
        ]


def own_bytes(pid: int) -> int:
    """Memory that is no file's and not shared: the part of its resident memory that grows if it keeps something."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def config_for(directory: Path, **sections: Any) -> FinetuneConfig:
    """A run that is the same to the bit at any number of ranks, and never complete."""
    cluster = {
        "launch": "ray", "device": "cpu", "gpus_per_worker": 1, "max_failures": -1, "wait_minutes": 5,
        **sections.pop("cluster"),
    }  # fmt: skip
    return config_of(
        directory,
        **{
            "run": {"exact": True, "threads": 1},
            "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 100_000},
            "optim": {"lr": 1e-3, "schedule_steps": 100_000, "warmup_steps": 10},
            "parallel": {"precision": "fp32"},
            "tracking": {"console": False, "mlflow": {"enabled": False}},
            **sections,
        },
        cluster=cluster,
    )


def undisturbed(config: FinetuneConfig, steps: int) -> list[dict[str, Any]]:
    """The same run on one rank, without Ray."""
    values = config.model_dump()
    values["run"]["name"] = "undisturbed"
    values["cluster"] |= {"launch": "local", "workers": 1, "gpus_per_worker": "auto"}
    values["tracking"]["mlflow"] |= {"enabled": False, "uri": None}
    found: list[dict[str, Any]] = []
    for last in (*range(1000, steps, 1000), steps):
        found = trajectory(FinetuneConfig.model_validate(values), 1, last)
    return found


def digests(run_dir: Path) -> dict[int, str]:
    """The digest of the weights in each checkpoint of a run, by step."""
    lines = read_events(run_dir / "events.jsonl")
    return {line["fields"]["step"]: line["fields"]["digest"] for line in lines if line["event"] == SAVED}


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of its steps."""
    return [line for line in read_metrics(run_dir / "metrics.jsonl") if line["kind"] == "step"]


def compare(config: FinetuneConfig, lines: list[dict[str, Any]], *, exact: bool = True) -> tuple[int, list[str]]:
    """The lines of a run's steps, with those of one rank: how many checkpoints both have, and what is not equal.
    `exact`: to the bit; else its code is of a time that knew no such thing, and only the samples must be equal."""
    steps = [line["trajectory"] for line in lines]
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        return 0, ["the record has not every step once"]
    alone = undisturbed(config, len(steps))
    if not exact:
        same = [step["samples"] for step in steps] == [step["samples"] for step in alone]
        return 0, [] if same else ["a step has other samples than that of one rank"]
    problems = [] if alone == steps else ["a step is not equal to the bit to that of one rank"]
    place = Path(config.run.storage)
    saved, others = digests(place / config.run.name), digests(place / "undisturbed")
    both = saved.keys() & others.keys()
    if not both or any(saved[step] != others[step] for step in both):
        problems.append("a checkpoint has other weights than that of one rank")
    return len(both), problems


def conclude(out: Path | None, what: str, seed: int, found: dict[str, Any], problems: list[str]) -> bool:
    """Write what was found to a file, if one is named, and print the problems. Returns whether there are any."""
    if out is not None:
        kept = {key: value for key, value in found.items() if key not in ("lines", "config")}
        write_result(out, {"what": what, "seed": seed, **kept, "problems": problems})
    for problem in problems:
        print(problem)
    return bool(problems)
