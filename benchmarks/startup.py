"""Time from the command to the first step, and from the death of a rank to the next step: ours beside bare Ray Train.

    python -m benchmarks.startup [--rounds 7] [--workers 2] [--out benchmarks/results/startup.json]

Both sides are fresh processes that start their own Ray, with equally many logical CPUs and without a dashboard, and
train the same small Llama on the same stream of the demo's conversations, nothing of it in a cache. In turn, and each
round begins with the other side.

- start: from the start of the process to the end of the first step
- recovery: once the run is five steps past its first checkpoint, the last rank's process is killed (SIGKILL); from then
  to the end of the next step that is trained

Of both, the wall clock (`total`) and the processor time (`processor`) of the command and of all processes below it:
Ray's, the ranks, those that have ended. Before a round begins the script waits up to three minutes for the machine's
load (of the last minute) to fall below 1, and records it. The ratio that counts is that of the wall clock if every
round began below 1, else that of processor time, since other work then decides what the clock says. A ratio is the
median over the rounds of ours by bare in the same round; with it come the lowest and the highest.

The end of a step is when the side has written that into its file, at which this script looks 50 times a second. `bare`
is benchmarks/bare_ray_train.py, with Ray Train's own settings. The phases are each side's own; one that is done while
another goes on shows only what it takes longer than that. A dash: it has no such phase.

    start    the process, until its imports are done        checks   config, model, data (ours); data (bare)
    Ray      until it runs (ours: beside the checks)        noticed  that a rank has died
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
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import yaml

from benchmarks.fresh import REPOSITORY, Command, environment, read_lines, warm_up
from benchmarks.record import write_result
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER
from raytune_fsdp.launch.ray.resources import local_cpus

SAVE_EVERY, KILL_AT, STEPS = 20, 25, 50
CALM, SETTLE_SECONDS = 1.0, 180
"""The load above which the clock does not count, and how long a round waits for it to fall."""
PHASES = ("start", "checks", "Ray", "noticed", "workers", "imports", "model", "data", "step")
MEASURED = ("total", "processor")
COLUMNS = (*PHASES, *MEASURED)
Seconds = dict[str, float]


def config(directory: Path, workers: int) -> dict[str, Any]:
    return {
        "run": {"name": "run", "storage": str(directory), "seed": 7, "resume": "never"},
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
        "train": {"global_batch": 4, "micro_batch": 2, "max_steps": STEPS},
        "checkpoint": {"every": SAVE_EVERY},
        "tracking": {"mlflow": {"enabled": False}},
        "cluster": {"workers": workers, "device": "cpu"},
        "export": {"at_end": False},
    }  # fmt: skip


class Side(Protocol):
    def command(self) -> list[str]: ...
    def steps(self) -> list[tuple[int, int]]:
        """Of every step that is on record: something that differs between attempts, and its number."""

    def process_of(self, rank: int, command: Command) -> int: ...
    def phases(self, since: float, *, again: bool) -> Seconds:
        """From then to the first step of the first attempt, or of the second one."""


class Ours:
    def __init__(self, directory: Path) -> None:
        self.directory, self.run = directory, directory / "run"

    def command(self) -> list[str]:
        return [str(REPOSITORY / "jobs" / "finetune.py"), "--config", str(self.directory / "config.yaml")]

    def steps(self) -> list[tuple[int, int]]:
        lines = read_lines(self.run / "metrics.jsonl")
        return [(line["attempt"], line["trajectory"]["step"]) for line in lines if line["kind"] == "step"]

    def process_of(self, rank: int, command: Command) -> int:
        """A rank's output goes into a file of its own, of which its process holds the other end."""
        log = self.run / "logs" / "attempt-1" / f"rank-{rank}.log"
        return next(each.pid for each in command.descendants() if _stdout(each.pid) == str(log.resolve()))

    def phases(self, since: float, *, again: bool) -> Seconds:
        events = [line for line in read_lines(self.run / "events.jsonl") if line["event"] == "first_step"]
        event = events[again]
        began = datetime.fromisoformat(event["time"]).timestamp() - event["fields"]["seconds"]
        return {"noticed" if again else "start": began - since, **event["fields"]["phases"]}


class Bare:
    def __init__(self, directory: Path, *, dashboard: bool = False) -> None:
        self.directory, self.marks, self.dashboard = directory, directory / "marks.jsonl", dashboard

    def command(self) -> list[str]:
        script = str(REPOSITORY / "benchmarks" / "bare_ray_train.py")
        return [script, str(self.directory / "config.yaml"), str(self.marks), *["--dashboard"] * self.dashboard]

    def steps(self) -> list[tuple[int, int]]:
        return [(line["pid"], line["step"]) for line in read_lines(self.marks) if line["what"] == "step"]

    def process_of(self, rank: int, command: Command) -> int:
        return next(line["pid"] for line in read_lines(self.marks) if line["what"] == "rank" and line["rank"] == rank)

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


def _stdout(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return None


def measure(side: Side, name: str, directory: Path) -> dict[str, Seconds]:
    """Start, kill, and let it finish."""
    ranks = yaml.safe_load((directory / "config.yaml").read_text())["cluster"]["workers"]
    cpus = local_cpus(ClusterConfig(workers=ranks, device="cpu"), ranks)
    env = {**environment(directory / "ray"), "BENCHMARK_CPUS": str(cpus)}
    if isinstance(side, Bare):
        env["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home directory
    with Command(side.command(), directory / f"{name}.log", env) as command:
        _, first = command.wait_for(lambda: side.steps()[:1] or None, "first step")
        until_first = command.processor.seconds()
        command.wait_for(lambda: side.steps()[-1][1] >= KILL_AT or None, f"step {KILL_AT}")
        attempt = side.steps()[-1][0]
        victim = side.process_of(ranks - 1, command)
        until_kill = command.processor.seconds()
        os.kill(victim, signal.SIGKILL)
        killed = time.time()
        steps, recovered = command.wait_for(
            lambda: [step for which, step in side.steps() if which != attempt and step > SAVE_EVERY] or None,
            "step after the kill",
        )
        since_kill = command.processor.seconds() - until_kill
        assert steps[0] == SAVE_EVERY + 1, f"{name}: goes on with step {steps[0]}"
        command.finish()
    assert side.steps()[-1][1] == STEPS, f"{name}: last step {side.steps()[-1][1]}"
    return {
        "start": {
            **side.phases(command.started, again=False),
            "total": first - command.started,
            "processor": until_first,
        },
        "recovery": {**side.phases(killed, again=True), "total": recovered - killed, "processor": since_kill},
    }


def run_once(kind: str, number: int, options: argparse.Namespace) -> dict[str, Seconds]:
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the names of Ray's sockets have a limit
    try:
        (directory / "config.yaml").write_text(yaml.safe_dump(config(directory, options.workers)))
        side: Side = Ours(directory) if kind == "ours" else Bare(directory, dashboard=options.dashboard)
        return measure(side, f"{kind}-{number}", directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def table(found: dict[str, list[dict[str, Seconds]]], part: str) -> dict[str, Seconds]:
    """Medians by side and phase. The phases' medians need not add up to the median of their sums."""
    rows: dict[str, Seconds] = {}
    for kind, rounds in found.items():
        names = [name for name in COLUMNS if name in rounds[0][part]]
        rows[kind] = {name: round(median(each[part][name] for each in rounds), 2) for name in names}
    return rows


def ratios_of(found: dict[str, list[dict[str, Seconds]]], part: str) -> dict[str, dict[str, Any]]:
    """Ours by bare, of the wall clock and of processor time."""
    ratios = {}
    for what in MEASURED:
        pairs = zip(found["ours"], found["bare"], strict=True)
        each = [ours[part][what] / bare[part][what] for ours, bare in pairs]
        ratios[what] = {"ratio": median(each), "lowest": min(each), "highest": max(each), "rounds": each}
    return ratios


def show(part: str, rows: dict[str, Seconds], ratios: dict[str, dict[str, Any]], counts: str) -> None:
    names = [name for name in COLUMNS if any(name in row for row in rows.values())]
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
    return round(load, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--settle", type=float, default=SETTLE_SECONDS, help="seconds that a round waits for a calm load"
    )
    parser.add_argument("--warm", action="store_true", help="what both sides import is in the file cache already")
    parser.add_argument("--dashboard", action="store_true", help="bare Ray starts its dashboard, as it does by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.warm:
        warm_up()
    found: dict[str, list[dict[str, Seconds]]] = {"ours": [], "bare": []}
    loads: list[float] = []
    for number in range(1, options.rounds + 1):
        loads.append(settle(options.settle))
        for kind in ("ours", "bare") if number % 2 else ("bare", "ours"):
            values = run_once(kind, number, options)
            found[kind].append(values)
            totals = ", ".join(
                f"{part} {phases['total']:.1f} s ({phases['processor']:.1f} s of processor time)"
                for part, phases in values.items()
            )
            print(f"round {number}, which began at a load of {loads[-1]}, {kind}: {totals}", flush=True)
    counts = which_counts(loads)
    result: dict[str, Any] = {
        "workers": options.workers,
        "dashboard_of_bare": options.dashboard,
        "loads": loads,
        "counts": counts,
        "rounds": found,
    }
    for part in ("start", "recovery"):
        rows, ratios = table(found, part), ratios_of(found, part)
        show(part, rows, ratios, counts)
        result[part] = {**rows, "ratios": ratios}
    if options.out is not None:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
