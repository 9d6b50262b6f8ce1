"""Chaos: a run on a cluster of this machine, to which something happens every minute, and what became of it.

    make chaos SECONDS=600 SEED=1

Every fault is drawn by the seed: 60 s after the last one, or 10 s after the first step that follows it, whichever is
later. In the end the cluster loses its head. Then the run, which has `run.exact`, is compared with an undisturbed one
of one rank: every step on record is equal to the bit, and so is every checkpoint. MLflow has every step. Exits with 1
if not, if anything had to be done by hand, or if anything is left.
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
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from raytune_fsdp.config import FinetuneConfig
from tests.disturbed import RECOVERY_SECONDS, Disturbed, compare, conclude, config_for, steps_of
from tests.mlflow_server import Server, whole
from tests.ray.jobs import ROOT, Nodes, Pipe, events

STARTUP = ROOT / "benchmarks" / "results" / "startup.json"
PAUSE_SECONDS, AFTER_STEP_SECONDS = 60.0, 10.0
EVERY = 10
OUTAGE_SECONDS = 15.0
AWAY_SECONDS, FLAP_SECONDS = 60.0, 20.0
GONE_SECONDS = 150.0
"""Until the processes of a cluster without its head have ended, by Ray's own limit of a minute, and then what they were
forked from, which ends after a minute in which nobody has wanted it."""


@dataclass(kw_only=True)
class Chaos(Disturbed):
    mlflow: Server
    pipe: Pipe
    drained: list[str] = field(default_factory=list)
    deck: list[Callable[[Chaos], str]] = field(default_factory=list)
    done: list[dict[str, Any]] = field(default_factory=list)

    # --- Faults: each does it, and says what -------------------------------------------------------------------------

    def worker_kill(self) -> str:
        rank = self.one_rank()
        psutil.Process(rank["pid"]).kill()
        return f"rank {rank['rank']} killed"

    def rank_stop(self) -> str:
        rank = self.one_rank()
        psutil.Process(rank["pid"]).send_signal(signal.SIGSTOP)
        return f"rank {rank['rank']} stopped"

    def one_rank(self) -> dict[str, Any]:
        """One that lives. A node that went may have taken along those that joined last: then the next ones."""
        until, rank = time.monotonic() + RECOVERY_SECONDS, self.random.choice(self.ranks())
        while not psutil.pid_exists(rank["pid"]) and time.monotonic() < until:
            time.sleep(0.5)
            rank = self.ranks()[0]
        return rank

    def node_removal(self) -> str:
        if len(self.living) < 2:
            return self.node_addition()
        name = self.take()
        self.nodes.remove(name)
        return f"node {name} removed"

    def node_addition(self) -> str:
        return f"node {self.add_node()} added"

    def drain(self) -> str:
        if len(self.living) < 2:
            return self.node_addition()
        name = self.take()
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
        self.start()
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
            name, _ = self.living.popitem()
            self.nodes.remove(name)
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

    def take(self) -> str:
        """One of the nodes, which is no longer one of the living."""
        name = self.random.choice(list(self.living))
        del self.living[name]
        return name

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
        self.look()


FAULTS: list[Callable[[Chaos], str]] = [
    Chaos.worker_kill, Chaos.rank_stop, Chaos.node_removal, Chaos.node_addition, Chaos.drain, Chaos.storage_error,
    Chaos.mlflow_down, Chaos.driver_kill, Chaos.board_kill, Chaos.controller_kill, Chaos.coordinator_kill,
    Chaos.builder_kill, Chaos.driver_stop, Chaos.output_blocked, Chaos.node_flaps,
]  # fmt: skip


def config_of(directory: Path, uri: str) -> FinetuneConfig:
    return config_for(
        directory,
        checkpoint={"every": EVERY, "keep_last": 3},
        cluster={"workers": {"min": 1, "max": 3}, "hang_minutes": 0.25},
        tracking={"console": False, "mlflow": {"enabled": True, "uri": uri}},
    )


def wreak(directory: Path, seconds: float, seed: int, tree: Path = ROOT) -> dict[str, Any]:
    """The chaos. Returns what was done, what was trained, and what is left."""
    mlflow = Server(directory / "mlflow")
    config = config_of(directory, mlflow.uri)
    try:
        with Nodes(directory, head_cpus=1, tree=tree) as nodes:
            chaos = Chaos(
                directory, config, nodes, random.Random(seed),
                mlflow=mlflow, pipe=Pipe(directory / "output.txt"), tree=tree,
            )  # fmt: skip
            chaos.start()
            (chaos.run.faults / "pace").write_text("0.2")
            for _ in range(3):
                chaos.node_addition()
            began = time.monotonic()
            chaos.settle(0)
            while time.monotonic() - began < seconds:
                struck = time.monotonic()
                chaos.strike()
                time.sleep(max(0.0, PAUSE_SECONDS - (time.monotonic() - struck)))
            took = time.monotonic() - began
            groups, reached = chaos.groups(), chaos.run.steps()
            if tree == ROOT:
                nodes.head.kill()  # the last one: nothing of Ray answers any more
            else:  # which another checkout need not notice
                chaos.run.process.send_signal(signal.SIGTERM)
            code, said = chaos.run.end(120)
            # But for what the last attempt was saving when its head died: the next one would remove it.
            cut_off = f"*.a{events(chaos.run.run_dir, 'first_step')[-1]['attempt']}.*.tmp"
            left = [each for each in chaos.left_behind(GONE_SECONDS) if not Path(each).match(cut_off)]
        left += chaos.shared_left()
        lines = steps_of(chaos.run.run_dir)
        without_head = code == 1 and "the head of the Ray cluster at" in said and "Failed to connect to GCS" not in said
        ended = without_head if tree == ROOT else code == 130
        problems = [] if ended else [f"the command ended with {code}: {said[-2000:]}"]
        # The workers', and one of a run that would like to grow.
        problems += [] if groups <= 2 else [f"{groups} placement groups before the end, of one attempt"]
        problems += [f"left behind: {left}"] if left else []
        problems += [*chaos.memory.problems(), *compare_mlflow(mlflow.uri, lines, reached)]
    finally:
        mlflow.kill()
    return {
        "faults": chaos.done, "seconds": took, "memory": chaos.memory.record(), "growth": chaos.memory.growth(),
        "config": config, "lines": lines, "problems": problems,
    }  # fmt: skip


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
    losses = {line["trajectory"]["step"]: line["trajectory"]["loss"] for line in lines}
    sent = {point.step: point.value for point in points}
    if len(points) != len(sent) or not sent.items() <= losses.items() or not set(range(1, reached + 1)) <= sent.keys():
        return [f"MLflow has {len(points)} losses of {len(losses)} steps, or others"]
    return []


def judge(found: dict[str, Any], *, exact: bool = True) -> list[str]:
    """What is not as it should be; prints the rest."""
    lines = found["lines"]
    equal, unequal = compare(found["config"], lines, exact=exact)
    problems = [*found["problems"], *unequal]
    sizes = [world for world, _ in groupby(line["world_size"] for line in lines)]
    pace = median(line["step_seconds"] for line in lines)
    ours = sum(line["step_seconds"] for line in lines) / found["seconds"]
    faults = len(found["faults"])
    lost = faults * (bare_recovery() + EVERY / 2 * pace)
    bare = max(0.0, 1 - lost / found["seconds"])
    found |= {"steps": len(lines), "sizes": sizes, "equal_checkpoints": equal, "productive": ours, "bare_ray": bare}
    print(
        f"{faults} faults in {found['seconds']:.0f} s, {len(lines)} steps of {pace:.2f} s; {len(sizes)} sizes, "
        f"{equal} checkpoints compared with those of one rank"
    )
    for what, grown in found["growth"].items():
        print(f"{what}: {grown / 2**20:+.2f} MiB from attempt to attempt")
    print(f"productive {ours:.0%}; bare Ray Train, had it recovered from each: at most {bare:.0%}")
    return problems


def bare_recovery() -> float:
    """The seconds that bare Ray Train takes after the loss of a rank, as they were last measured."""
    seconds: float = json.loads(STARTUP.read_text())["recovery"]["bare"]["total"]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout of the repository, whose code runs")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        found = wreak(Path(name), arguments.seconds, arguments.seed, tree)
        problems = judge(found, exact=tree == ROOT)
    return conclude(arguments.out, "chaos: faults, and what became of the run", arguments.seed, found, problems)


if __name__ == "__main__":
    sys.exit(main())
