"""Chaos: a run on a cluster of this machine, to which something happens every minute, and what became of it.

    make chaos SECONDS=600 SEED=1

Every fault is drawn by the seed: 60 s after the last one, or 10 s after the first step that follows it, whichever is
later. In the end the cluster loses its head. Then the run, which has `run.exact`, is compared with an undisturbed one
of one rank: every step on record is equal to the bit, and so is every checkpoint. MLflow has every step. Exits with 1
if not, if anything had to be done by hand, or if anything is left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_events, read_metrics
from raytune_fsdp.record.names import SAVED
from tests.mlflow_server import Server, whole
from tests.ray.jobs import TEMPORARY, Command, Nodes, Pipe, config_of, events
from tests.runs import trajectory

PAUSE_SECONDS, AFTER_STEP_SECONDS = 60.0, 10.0
RECOVERY_SECONDS = 240.0
"""How long the run may take to train again; then somebody would have to look at it."""
EVERY = 10
BARE_RECOVERY_SECONDS = 13.5
"""Of bare Ray Train after the loss of a rank: benchmarks/results/startup.json, median."""
OURS = ("RayTrainWorker", "_Board", "TrainController", "_NodeWatch", "SplitCoordinator")
"""Processes that end with the run."""
OUTAGE_SECONDS = 15.0
GROUPS = """
import ray
ray.init(namespace="chaos", log_to_driver=False)
groups = ray.util.placement_group_table().values()
print(sum(each["state"] != "REMOVED" for each in groups))
"""
AWAY_SECONDS, FLAP_SECONDS = 60.0, 20.0
GONE_SECONDS = 90.0
"""Until the processes of a cluster without its head have ended, by Ray's own limit of a minute."""


@dataclass
class Chaos:
    directory: Path
    nodes: Nodes
    mlflow: Server
    config: FinetuneConfig
    random: random.Random
    run: Command
    pipe: Pipe
    living: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    added: int = 0
    deck: list[Callable[[Chaos], str]] = field(default_factory=list)
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
        self.added += 1
        name = f"n{self.added}"
        self.nodes.add(name)
        self.living.append(name)
        return f"node {name} added"

    def drain(self) -> str:
        if len(self.living) < 2:
            return self.node_addition()
        name = self.living.pop(self.random.randrange(len(self.living)))
        self.nodes.drain(name, 20)
        self.drained.append(name)
        return f"node {name} drained in 20 s"

    def storage_error(self) -> str:
        (self.run.faults / "storage-error").touch()
        return f"the storage of checkpoints fails for {OUTAGE_SECONDS:g} s"

    def mlflow_down(self) -> str:
        self.mlflow.kill()
        return f"MLflow's server killed, and started again after {OUTAGE_SECONDS:g} s"

    def driver_kill(self) -> str:
        self.run.process.kill()
        self.run.process.wait()
        self.run = start(self.config, self.directory, self.nodes, self.pipe)
        return "the driver killed, and the same command again"

    def driver_stop(self) -> str:
        """As a laptop that sleeps. Ranks go on, and their limit is shorter than that."""
        self.run.process.send_signal(signal.SIGSTOP)
        time.sleep(AWAY_SECONDS)
        self.run.process.send_signal(signal.SIGCONT)
        return f"the driver stopped for {AWAY_SECONDS:g} s"

    def output_blocked(self) -> str:
        """With a rank that dies, of which the driver says something: it waits in that."""
        what = self.worker_kill()
        self.pipe.block(AWAY_SECONDS)
        return f"the output of the driver blocked for {AWAY_SECONDS:g} s, and {what}"

    def node_flaps(self) -> str:
        """Room that does not last."""
        for _ in range(3):
            self.node_addition()
            time.sleep(FLAP_SECONDS)
            self.nodes.remove(self.living.pop())
            time.sleep(FLAP_SECONDS)
        return f"a node added and taken every {FLAP_SECONDS:g} s, three times"

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

    def draw(self) -> str:
        """Every kind of fault once, in another order each time."""
        if not self.deck:
            self.deck = self.random.sample(FAULTS, len(FAULTS))
        return self.deck.pop()(self)

    def strike(self) -> None:
        began = time.monotonic()
        steps = self.run.steps()
        what = self.draw()
        print(f"{time.strftime('%H:%M:%S')} after step {steps}: {what}", flush=True)
        self.settle(steps)
        seconds = time.monotonic() - began
        self.done.append({"fault": what, "after_step": steps, "seconds": round(seconds, 1)})

    def settle(self, steps: int) -> None:
        """Wait until the run has trained further, and ten seconds more."""
        time.sleep(OUTAGE_SECONDS)
        (self.run.faults / "storage-error").unlink(missing_ok=True)
        if not self.mlflow.lives():
            self.mlflow.start()
        self.run.until(lambda: self.run.steps() > steps + 2, RECOVERY_SECONDS)
        for name in self.drained:  # its machine is gone after that
            self.nodes.remove(name)
        self.drained.clear()
        time.sleep(AFTER_STEP_SECONDS)


FAULTS: list[Callable[[Chaos], str]] = [
    Chaos.worker_kill, Chaos.rank_stop, Chaos.node_removal, Chaos.node_addition, Chaos.drain, Chaos.storage_error,
    Chaos.mlflow_down, Chaos.driver_kill, Chaos.board_kill, Chaos.controller_kill, Chaos.coordinator_kill,
    Chaos.builder_kill, Chaos.driver_stop, Chaos.output_blocked, Chaos.node_flaps,
]  # fmt: skip


def config_for(directory: Path, uri: str | None = None) -> FinetuneConfig:
    return config_of(
        directory,
        run={"exact": True, "threads": 1},
        train={"global_batch": 10, "micro_batch": 2, "max_steps": 100_000},
        optim={"lr": 1e-3, "schedule_steps": 100_000, "warmup_steps": 10},
        parallel={"precision": "fp32"},
        checkpoint={"every": EVERY, "keep_last": 3},
        cluster={
            "launch": "ray", "workers": {"min": 1, "max": 3}, "device": "cpu", "gpus_per_worker": 1,
            "max_failures": -1, "hang_minutes": 0.25, "wait_minutes": 5,
        },
        tracking={"console": False, "mlflow": {"enabled": uri is not None, "uri": uri}},
    )  # fmt: skip


def wreak(directory: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The chaos. Returns what was done, what was trained, and what is left."""
    mlflow = Server(directory / "mlflow")
    config = config_for(directory, mlflow.uri)
    try:
        with Nodes(directory, head_cpus=1) as nodes:
            pipe = Pipe(directory / "output.txt")
            run = start(config, directory, nodes, pipe)
            (run.faults / "pace").write_text("0.2")
            chaos = Chaos(directory, nodes, mlflow, config, random.Random(seed), run, pipe)
            for _ in range(3):
                chaos.node_addition()
            began = time.monotonic()
            chaos.settle(0)
            while time.monotonic() - began < seconds:
                struck = time.monotonic()
                chaos.strike()
                time.sleep(max(0.0, PAUSE_SECONDS - (time.monotonic() - struck)))
            took = time.monotonic() - began
            groups, reached = groups_of(nodes), chaos.run.steps()
            nodes.head.kill()  # the last one: nothing of Ray answers any more
            code, said = chaos.run.end(120)
            left = leftovers(chaos)
        lines = list(read_metrics(run.run_dir / "metrics.jsonl"))
        ended = code == 1 and "the head of the Ray cluster at" in said and "Failed to connect to GCS" not in said
        problems = [] if ended else [f"the command ended with {code}: {said[-2000:]}"]
        problems += [] if groups <= 2 else [f"{groups} placement groups before the end, of one attempt"]
        problems += [f"left behind: {left}"] if left else []
        problems += compare_mlflow(mlflow.uri, lines, reached)
    finally:
        mlflow.kill()
    return {"faults": chaos.done, "seconds": took, "lines": lines, "problems": problems}


def start(config: FinetuneConfig, directory: Path, nodes: Nodes, pipe: Pipe) -> Command:
    return Command(config, directory, pipe=pipe, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")


def groups_of(nodes: Nodes) -> int:
    """Placement groups that there are: the workers', and one of a run that would like to grow."""
    environment = {**os.environ, "RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled"}
    asked = subprocess.run([sys.executable, "-c", GROUPS], env=environment, capture_output=True, text=True, check=True)
    return int(asked.stdout.strip().splitlines()[-1])


def leftovers(chaos: Chaos) -> list[str]:
    """Processes and locks of the run, and files in temporary directories, a while after its end."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline and any(chaos.of_ray(what) for what in OURS):
        time.sleep(1)
    run = chaos.run.run_dir
    return [
        *(what for what in OURS for _ in chaos.of_ray(what)),
        *(str(path) for pattern in ("lock*", ".shared-*") for path in run.glob(pattern)),
        # But for torch's cache, which all its processes share.
        *(str(path) for path in TEMPORARY.iterdir() if not path.name.startswith("torchinductor_")),
    ]


def compare_mlflow(uri: str, lines: list[dict[str, Any]], reached: int) -> list[str]:
    """MLflow has one run, and of every step the loss of the record, at least to where the head was when it died: ranks
    train on until they notice, and the next command would send that."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("raytune_fsdp")
    runs = whole(client.search_runs([experiment.experiment_id]))
    if len(runs) != 1:
        return [f"MLflow has {len(runs)} runs"]
    points = client.get_metric_history(runs[0].info.run_id, "train/loss")
    losses = {line["trajectory"]["step"]: line["trajectory"]["loss"] for line in lines if line["kind"] == "step"}
    sent = {point.step: point.value for point in points}
    if len(points) != len(sent) or not sent.items() <= losses.items() or not set(range(1, reached + 1)) <= sent.keys():
        return [f"MLflow has {len(points)} losses of {len(losses)} steps, or others"]
    return []


def undisturbed(directory: Path, steps: int) -> list[dict[str, Any]]:
    """The same run on one rank, without Ray."""
    config = config_for(directory).model_dump()
    config["run"]["name"] = "undisturbed"
    config["cluster"] |= {"launch": "local", "workers": 1, "gpus_per_worker": "auto"}
    found: list[dict[str, Any]] = []
    for last in (*range(1000, steps, 1000), steps):
        found = trajectory(FinetuneConfig.model_validate(config), 1, last)
    return found


def digests(directory: Path, name: str) -> dict[int, str]:
    """The digest of the weights in each checkpoint of a run, by step."""
    lines = read_events(directory / "runs" / name / "events.jsonl")
    return {line["fields"]["step"]: line["fields"]["digest"] for line in lines if line["event"] == SAVED}


def judge(found: dict[str, Any], directory: Path) -> list[str]:
    """What is not as it should be; prints the rest."""
    lines = [line for line in found["lines"] if line["kind"] == "step"]
    steps, problems = [line["trajectory"] for line in lines], list(found["problems"])
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        return [*problems, "the record has not every step once"]
    sizes = [world for world, _ in groupby(line["world_size"] for line in lines)]
    if undisturbed(directory, len(steps)) != steps:
        problems.append("a step is not equal to the bit to that of one rank")
    saved, alone = digests(directory, "run"), digests(directory, "undisturbed")
    both = saved.keys() & alone.keys()
    if not both or any(saved[step] != alone[step] for step in both):
        problems.append("a checkpoint has other weights than that of one rank")
    pace = median(line["step_seconds"] for line in lines)
    ours = sum(line["step_seconds"] for line in lines) / found["seconds"]
    faults = len(found["faults"])
    lost = faults * (BARE_RECOVERY_SECONDS + EVERY / 2 * pace)
    bare = max(0.0, 1 - lost / found["seconds"])
    found |= {"steps": len(steps), "sizes": sizes, "equal_checkpoints": len(both), "productive": ours, "bare_ray": bare}
    print(
        f"{faults} faults in {found['seconds']:.0f} s, {len(steps)} steps of {pace:.2f} s; {len(sizes)} sizes, "
        f"{len(both)} checkpoints compared with those of one rank"
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
        kept = {key: value for key, value in found.items() if key != "lines"}
        what = "chaos: faults, and what became of the run"
        write_result(arguments.out, {"what": what, "seed": arguments.seed, **kept, "problems": problems})
    for problem in problems:
        print(problem)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
