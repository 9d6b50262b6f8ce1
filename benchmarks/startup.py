"""Time from the command to the first step, and from a loss to the next step: ours beside bare Ray Train.

    python -m benchmarks.startup [--rounds 7] [--workers 2] [--faults rank,node,driver]
                                 [--out benchmarks/results/startup.json]

Both sides are fresh processes without a dashboard and train the same small Llama on the same stream of the demo's
conversations, nothing of it in a cache. In turn, and each round begins with the other side.

- start: from the start of the process, which starts its own Ray with equally many logical CPUs, to the end of the first
  step
- recovery: the last rank's process is killed (SIGKILL); from then to the end of the next step that is trained
- node: the same for all processes of the last rank's node, at once. The cluster is of several nodes on this machine: a
  head without room for ranks, and one more node with room for one rank than there are ranks
- driver: on such a cluster, which stays, the command is killed and given again at once; from the kill to the end of the
  next step that is trained

What is lost is lost once the run is five steps past its first checkpoint; a node half a minute later, as most are lost
long after a start: what our ranks are forked from is made on each node after the first step, and here all nodes share
this machine's cores.

Of both sides, the wall clock (`total`) and the processor time (`processor`) of the command and of all processes below
it, or of the cluster: Ray's, the ranks, those that have ended. Before each of these in each round the script waits up
to five minutes for the machine's load (of the last minute) to fall below 1, and records it. The ratio that counts is
that of the wall clock if every round began below 1, else that of processor time, since other work then decides what the
clock says. A ratio is the median over the rounds of ours by bare in the same round; with it come the lowest and the
highest.

The end of a step is when the side has written that into its file, at which this script looks 50 times a second. `bare`
is benchmarks/bare_ray_train.py, with Ray's own settings; no settings of Ray are changed on the cluster, either. The
phases are each side's own; one that is done while another goes on shows only what it takes longer than that. A dash: it
has no such phase.

    start    the process, until its imports are done        checks   config, model, data (ours); data (bare)
    Ray      until it runs (ours: beside the checks)        noticed  that a rank or node is lost
    workers  until rank 0 is in our function                imports  transformers, torch (bare: before, in workers)
    model    built, or loaded from the checkpoint           data     until the first batch is there
    step     the first one
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import yaml

from benchmarks.fresh import REPOSITORY, Command, Lines, ProcessorTime, environment, read_lines, warm_up
from benchmarks.record import write_result
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER
from raytune_fsdp.launch.ray.resources import local_cpus
from tests.ray.jobs import Nodes

SAVE_EVERY, KILL_AT, STEPS = 20, 25, 50
LATER_SECONDS, MORE_STEPS = 30, 5000
"""How much later a node is lost, and the length of that run, which is not waited for."""
CALM, SETTLE_SECONDS = 1.0, 300
"""The load above which the clock does not count, and how long a round waits for it to fall."""
FAULTS = {"rank": ("start", "recovery"), "node": ("node",), "driver": ("driver",)}
"""What is lost, and what is measured of that."""
PHASES = ("noticed", "start", "checks", "Ray", "workers", "imports", "model", "data", "step")
MEASURED = ("total", "processor")
COLUMNS = (*PHASES, *MEASURED)
Seconds = dict[str, float]


def config(directory: Path, workers: int, fault: str) -> dict[str, Any]:
    # Each rank on a node of its own, of those that have room for one (`cluster`).
    place = {} if fault == "rank" else {"resources_per_worker": {"rank": 1}}
    steps = MORE_STEPS if fault == "node" else STEPS
    return {
        "run": {"name": "run", "storage": str(directory), "seed": 7},
        "model": {
            "init": "random",
            "tokenizer": str(TOKENIZER),
            "architecture": {
                "model_type": "llama", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 512, "tie_word_embeddings": True,
            },
        },
        "data": {"train": [{"path": str(CONVERSATIONS)}], "seq_len": 256, "window": 64},
        "parallel": {"precision": "fp32"},
        "optim": {"lr": 1e-3},
        "train": {"global_batch": 4, "micro_batch": 2, "max_steps": steps},
        "checkpoint": {"every": SAVE_EVERY},
        "tracking": {"mlflow": {"enabled": False}},
        "cluster": {"workers": workers, "device": "cpu", **place},
        "export": {"at_end": False},
    }  # fmt: skip


class Side(Protocol):
    def command(self) -> list[str]: ...
    def steps(self) -> list[tuple[int, int]]:
        """Of every step that is on record: something that differs between attempts, and its number."""

    def process_of(self, rank: int) -> int: ...
    def node_of(self, rank: int) -> str:
        """Ray's name of it."""

    def phases(self, since: float, *, again: bool) -> Seconds:
        """From then to the first step of the first attempt, or of the second one."""


class Ours:
    def __init__(self, directory: Path) -> None:
        self.directory, self.run = directory, directory / "run"
        self._metrics = Lines(self.run / "metrics.jsonl")

    def command(self) -> list[str]:
        return [str(REPOSITORY / "jobs" / "finetune.py"), "--config", str(self.directory / "config.yaml")]

    def steps(self) -> list[tuple[int, int]]:
        lines = self._metrics.read()
        return [(line["attempt"], line["trajectory"]["step"]) for line in lines if line["kind"] == "step"]

    def process_of(self, rank: int) -> int:
        return int(self._joined(rank)["pid"])

    def node_of(self, rank: int) -> str:
        return str(self._joined(rank)["node_id"])

    def _joined(self, rank: int) -> dict[str, Any]:
        (joined,) = self._events("ranks_joined")
        return next(each for each in joined["fields"]["ranks"] if each["rank"] == rank)

    def _events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run / "events.jsonl") if line["event"] == name]

    def phases(self, since: float, *, again: bool) -> Seconds:
        event = self._events("first_step")[again]
        phases: Seconds = dict(event["fields"]["phases"])
        began = datetime.fromisoformat(event["time"]).timestamp() - event["fields"]["seconds"]
        first = "start" if "start" in phases else "noticed"  # of a command, of another attempt
        return {**phases, first: phases.get(first, 0.0) + began - since}


class Bare:
    def __init__(self, directory: Path, *, dashboard: bool = False) -> None:
        self.directory, self.dashboard = directory, dashboard
        self.marks = directory / "marks.jsonl"
        self._lines = Lines(self.marks)

    def command(self) -> list[str]:
        # Not as a file: ranks would import what lies beside it in the place of packages of that name.
        script = ["-m", "benchmarks.bare_ray_train"]
        return [*script, str(self.directory / "config.yaml"), str(self.marks), *["--dashboard"] * self.dashboard]

    def steps(self) -> list[tuple[int, int]]:
        return [(line["pid"], line["step"]) for line in self._lines.read() if line["what"] == "step"]

    def process_of(self, rank: int) -> int:
        return int(self._joined(rank)["pid"])

    def node_of(self, rank: int) -> str:
        return str(self._joined(rank)["node_id"])

    def _joined(self, rank: int) -> dict[str, Any]:
        return next(line for line in read_lines(self.marks) if line["what"] == "rank" and line["rank"] == rank)

    def phases(self, since: float, *, again: bool) -> Seconds:
        phases: Seconds = {}
        last = since
        for line in read_lines(self.marks):
            what = line["what"]
            # A step may still end on ranks that do not know yet.
            if line["time"] > since and what in PHASES and (what != "step" or "data" in phases):
                phases[what], last = line["time"] - last, line["time"]
                if what == "step":
                    break
        return phases


@contextmanager
def cluster(directory: Path, workers: int, cpus: int) -> Iterator[tuple[Nodes, dict[str, str]]]:
    """Nodes that have room for one rank each, and one more than are needed; and their names by Ray's."""
    # PYTHONPATH: without the faults of tests.
    with Nodes(directory, head_cpus=cpus - workers, PYTHONPATH=str(REPOSITORY)) as nodes:
        yield nodes, {nodes.add(f"n{number}", gpus=0, ranks=1): f"n{number}" for number in range(1, workers + 2)}


def until_past_a_checkpoint(side: Side, command: Command) -> int:
    """Returns the attempt."""
    past = KILL_AT % SAVE_EVERY
    command.wait_for(
        lambda: (steps := side.steps()) and steps[-1][1] >= KILL_AT and steps[-1][1] % SAVE_EVERY >= past or None,
        f"step {KILL_AT}",
    )
    return side.steps()[-1][0]


def until_it_trains(side: Side, command: Command, attempt: int) -> float:
    """Wait for the next step of another attempt, which goes on from a checkpoint; returns when it ended."""
    steps, when = command.wait_for(
        lambda: [step for which, step in side.steps() if which != attempt and step > SAVE_EVERY] or None,
        "step after the kill",
    )
    assert steps[0] % SAVE_EVERY == 1, f"{command.name}: goes on with step {steps[0]}"
    return when


def measure_rank(side: Side, name: str, directory: Path, workers: int, cpus: int) -> dict[str, Seconds]:
    """Start, kill, and let it finish."""
    env = {**environment(directory / "ray"), "BENCHMARK_CPUS": str(cpus)}
    if isinstance(side, Bare):
        env["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home directory
    with Command(side.command(), directory / f"{name}.log", env) as command:
        _, first = command.wait_for(lambda: side.steps()[:1] or None, "first step")
        until_first = command.processor.seconds()
        attempt = until_past_a_checkpoint(side, command)
        until_kill = command.processor.seconds()
        os.kill(side.process_of(workers - 1), signal.SIGKILL)
        killed = time.time()
        recovered = until_it_trains(side, command, attempt)
        since_kill = command.processor.seconds() - until_kill
        command.finish()
    return {
        "start": {
            **side.phases(command.started, again=False),
            "total": first - command.started,
            "processor": until_first,
        },
        "recovery": {**side.phases(killed, again=True), "total": recovered - killed, "processor": since_kill},
    }


def measure_node(side: Side, name: str, directory: Path, workers: int, cpus: int) -> dict[str, Seconds]:
    with (
        cluster(directory, workers, cpus) as (nodes, names),
        counted(nodes) as processor,
        Command(side.command(), directory / f"{name}.log", joining(nodes, directory), processor) as command,
    ):
        until_past_a_checkpoint(side, command)
        time.sleep(LATER_SECONDS)
        attempt = until_past_a_checkpoint(side, command)
        lost, until_kill = names[side.node_of(workers - 1)], processor.seconds()
        killed = time.time()
        nodes.kill(lost)
        recovered = until_it_trains(side, command, attempt)
        since_kill = processor.seconds() - until_kill
    return {"node": {**side.phases(killed, again=True), "total": recovered - killed, "processor": since_kill}}


def measure_driver(side: Side, name: str, directory: Path, workers: int, cpus: int) -> dict[str, Seconds]:
    with cluster(directory, workers, cpus) as (nodes, _), counted(nodes) as processor:
        env = joining(nodes, directory)
        with Command(side.command(), directory / f"{name}.log", env, processor) as command:
            attempt = until_past_a_checkpoint(side, command)
            until_kill = processor.seconds()
            killed = time.time()
            command.kill()
        with Command(side.command(), directory / f"{name}-again.log", env, processor) as command:
            recovered = until_it_trains(side, command, attempt)
            since_kill = processor.seconds() - until_kill
            command.finish()
    return {"driver": {**side.phases(killed, again=True), "total": recovered - killed, "processor": since_kill}}


def joining(nodes: Nodes, directory: Path) -> dict[str, str]:
    return {**environment(directory / "ray"), "RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled"}


@contextmanager
def counted(nodes: Nodes) -> Iterator[ProcessorTime]:
    """The processor time of the cluster, and of the commands that join it."""
    processor = ProcessorTime(nodes.pid)
    processor.start()
    try:
        yield processor
    finally:
        processor.end()


MEASURE: dict[str, Callable[[Side, str, Path, int, int], dict[str, Seconds]]] = {
    "rank": measure_rank, "node": measure_node, "driver": measure_driver,
}  # fmt: skip


def run_once(fault: str, kind: str, number: int, options: argparse.Namespace) -> dict[str, Seconds]:
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the names of Ray's sockets have a limit
    workers = options.workers
    cpus = local_cpus(ClusterConfig(workers=workers, device="cpu"), workers)
    try:
        values = config(directory, workers, fault)
        (directory / "config.yaml").write_text(yaml.safe_dump(values))
        side: Side = Ours(directory) if kind == "ours" else Bare(directory, dashboard=options.dashboard)
        measured = MEASURE[fault](side, f"{kind}-{fault}-{number}", directory, workers, cpus)
        assert fault == "node" or side.steps()[-1][1] == STEPS, f"{kind}, {fault}: last step {side.steps()[-1][1]}"
        return measured
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def table(
    found: dict[str, list[dict[str, Seconds]]], part: str, columns: Iterable[str] = COLUMNS
) -> dict[str, Seconds]:
    """Medians by side and phase. The phases' medians need not add up to the median of their sums."""
    rows: dict[str, Seconds] = {}
    for kind, rounds in found.items():
        names = [name for name in columns if any(name in each[part] for each in rounds)]
        rows[kind] = {name: round(median(each[part].get(name, 0.0) for each in rounds), 2) for name in names}
    return rows


def ratios_of(found: dict[str, list[dict[str, Seconds]]], part: str) -> dict[str, dict[str, Any]]:
    """Ours by bare, of the wall clock and of processor time."""
    ratios = {}
    for what in MEASURED:
        pairs = zip(found["ours"], found["bare"], strict=True)
        each = [ours[part][what] / bare[part][what] for ours, bare in pairs]
        ratios[what] = {"ratio": median(each), "lowest": min(each), "highest": max(each), "rounds": each}
    return ratios


def show(
    part: str, rows: dict[str, Seconds], ratios: dict[str, dict[str, Any]], counts: str,
    columns: Iterable[str] = COLUMNS,
) -> None:  # fmt: skip
    names = [name for name in columns if any(name in row for row in rows.values())]
    print(f"\n{part:10}" + "".join(f"{name:>10}" for name in names))
    for kind, row in rows.items():
        print(f"{kind:10}" + "".join(f"{row[name]:10.2f}" if name in row else f"{'-':>10}" for name in names))
    for what, found in ratios.items():
        print(
            f"ours / bare, {what}: {found['ratio']:.2f} ({found['lowest']:.2f} to {found['highest']:.2f} in "
            f"{len(found['rounds'])} rounds){', which counts' * (what == counts)}"
        )


def which_counts(loads: list[float]) -> str:
    return "total" if max(loads) < CALM else "processor"


def settle(seconds: float) -> float:
    """Wait for a calm machine, for so long at most. Returns the load."""
    until = time.monotonic() + seconds
    while (load := os.getloadavg()[0]) >= CALM and time.monotonic() < until:
        time.sleep(1)
    return int(load * 100) / 100  # rounded up it might not be below 1 any more


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--faults", default=",".join(FAULTS), help="what is lost, of rank,node,driver")
    parser.add_argument(
        "--settle", type=float, default=SETTLE_SECONDS, help="seconds that a round waits for a calm load"
    )
    parser.add_argument("--warm", action="store_true", help="what both sides import is in the file cache already")
    parser.add_argument("--dashboard", action="store_true", help="bare Ray starts its dashboard, as it does by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.faults = options.faults.split(",")
    if unknown := set(options.faults) - FAULTS.keys():
        parser.error(f"--faults: {', '.join(sorted(unknown))}: one or more of {', '.join(FAULTS)}")
    return options


def main() -> None:
    options = arguments()
    if not options.warm:
        warm_up()
    found: dict[str, list[dict[str, Seconds]]] = {"ours": [], "bare": []}
    loads: dict[str, list[float]] = {fault: [] for fault in options.faults}
    for number in range(1, options.rounds + 1):
        for rounds in found.values():
            rounds.append({})
        for fault in options.faults:
            loads[fault].append(settle(options.settle))
            for kind in ("ours", "bare") if number % 2 else ("bare", "ours"):
                values = run_once(fault, kind, number, options)
                found[kind][-1] |= values
                totals = ", ".join(
                    f"{part} {phases['total']:.1f} s ({phases['processor']:.1f} s of processor time)"
                    for part, phases in values.items()
                )
                print(f"round {number}, which began at a load of {loads[fault][-1]}, {kind}: {totals}", flush=True)
    counts = {fault: which_counts(measured) for fault, measured in loads.items()}
    result: dict[str, Any] = {
        "workers": options.workers,
        "dashboard_of_bare": options.dashboard,
        "loads": loads,
        "counts": counts,
        "rounds": found,
    }
    for fault in options.faults:
        for part in FAULTS[fault]:
            rows, ratios = table(found, part), ratios_of(found, part)
            show(part, rows, ratios, counts[fault])
            result[part] = {**rows, "ratios": ratios}
    if options.out is not None:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
