"""A sweep from the command to its end: ours beside Ray Tune with a TorchTrainer by the book.

    python -m benchmarks.sweep [--rounds 5] [--trials 8] [--concurrent 2] [--workers 1]
                               [--out benchmarks/results/sweep.json]

Both sides train the same trials (a grid of learning rates, each trial to its end, CONCURRENT at a time): the same small
Llama on the same stream of the demo's conversations, with as many checkpoints and evaluations of its held-out ones. In
turn, and each round begins with the other side; each on a cluster of its own, of one node that is there already and has
nothing in a cache. Ours is `raytune-fsdp sweep`, the other side benchmarks/bare_tune.py, with Ray's own settings. Our
evaluations measure the answers' tokens, theirs all: so no losses are compared.

- total: from the start of the command to its end, and the processor time of the command and the cluster meanwhile
- a trial: its phases until its first step, as in benchmarks/startup.py; `train`, from there to the end of its last
  step, checkpoint and evaluation; and `rest`, all else that the sweep takes for a trial: its share of the total (times
  CONCURRENT), less phases and `train`. So processes that start before the first phase, the end of a run, and what
  decides over trials are in `rest`
- overhead: phases and `rest`, without `train`. Ours trains its first steps on rows that the rank has read itself, and
  waits for the stream after them, in `train` (5 to 6 s of two trials on two cores); the other side waits in `data`

Of all trials of a round the mean, of rounds the median; the ratio is the median of ours by theirs in the same round,
with the lowest and the highest, and that of processor time counts where a round began at a load above 1.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.fresh import REPOSITORY, Command, read_lines, warm_up
from benchmarks.record import write_result
from benchmarks.startup import SETTLE_SECONDS, counted, joining, ratios_of, settle, show, table, which_counts
from benchmarks.startup import config as config_of_startup
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.demo import HELDOUT
from raytune_fsdp.launch.ray.resources import local_cpus
from tests.ray.jobs import Nodes

NAME, EVERY, STEPS = "sweep", 20, 60
LONGEST_SECONDS = 1800
PART = "trial"
Seconds = dict[str, float]


def config(directory: Path, workers: int) -> dict[str, Any]:
    values = config_of_startup(directory, workers, "rank")
    values["data"]["eval"] = [{"path": str(HELDOUT)}]
    return {
        **values,
        "eval": {"every": EVERY},
        "checkpoint": {"every": EVERY},
        "train": {**values["train"], "max_steps": STEPS},
        "tracking": {"mlflow": {"enabled": False}},
    }


def rates(trials: int) -> list[float]:
    return [round(1e-4 * 100 ** (number / max(1, trials - 1)), 8) for number in range(trials)]


def ours(directory: Path, options: argparse.Namespace) -> list[str]:
    values = {
        "name": NAME,
        "storage": str(directory),
        "base": str(directory / "config.yaml"),
        "space": {"optim.lr": {"grid": rates(options.trials)}},
        "scheduler": {"type": "none"},
        "concurrent": options.concurrent,
    }
    (directory / "sweep.yaml").write_text(yaml.safe_dump(values))
    return ["-m", "raytune_fsdp.cli.main", "sweep", str(directory / "sweep.yaml")]


def bare(directory: Path, options: argparse.Namespace) -> list[str]:
    (directory / "marks").mkdir()
    given = [str(directory / "config.yaml"), str(directory / "marks"), str(options.concurrent)]
    return ["-m", "benchmarks.bare_tune", *given, *map(str, rates(options.trials))]


def trials_of_ours(directory: Path) -> list[Seconds]:
    found = []
    for run in sorted(directory.glob(f"{NAME}-*")):
        lines = read_lines(run / "metrics.jsonl")
        (first,) = [line for line in read_lines(run / "events.jsonl") if line["event"] == "first_step"]
        steps = [line["trajectory"]["step"] for line in lines if line["kind"] == "step"]
        assert steps == list(range(1, STEPS + 1)), f"{run.name}: steps up to {steps[-1:]}"
        last = max(datetime.fromisoformat(line["time"]).timestamp() for line in lines)
        train = last - datetime.fromisoformat(first["time"]).timestamp()
        found.append({**first["fields"]["phases"], "train": max(0.0, train)})
    return found


def trials_of_bare(directory: Path) -> list[Seconds]:
    found = []
    for file in sorted((directory / "marks").glob("*.jsonl")):
        lines = read_lines(file)
        assert lines[-1]["what"] == "end", f"{file.name} ends with {lines[-1]['what']}"
        phases, last = {}, lines[0]["time"]
        for line in lines[1:]:
            what = line["what"]
            if what in ("checks", "workers", "model", "data") or (what, line.get("step")) == ("step", 1):
                phases[what], last = line["time"] - last, line["time"]
        (end,) = [line["time"] for line in lines if (line["what"], line.get("step")) == ("saved", STEPS)]
        found.append({**phases, "train": end - last})
    return found


SIDES = {"ours": (ours, trials_of_ours), "bare": (bare, trials_of_bare)}


def run_once(kind: str, number: int, options: argparse.Namespace) -> dict[str, Seconds]:
    """The trial's phases by `PART`, and `sweep`."""
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the names of Ray's sockets have a limit
    workers = options.workers
    # A CPU more for each trial: the other side's drivers take one.
    cpus = options.concurrent * (local_cpus(ClusterConfig(workers=workers, device="cpu"), workers) + 1)
    command_of, trials_of = SIDES[kind]
    try:
        (directory / "config.yaml").write_text(yaml.safe_dump(config(directory, workers)))
        with (
            Nodes(directory, head_cpus=cpus, PYTHONPATH=str(REPOSITORY)) as nodes,
            counted(nodes) as processor,
        ):
            before = processor.seconds()
            env = joining(nodes, directory)
            with Command(command_of(directory, options), directory / f"{kind}-{number}.log", env, processor) as command:
                total = command.finish(LONGEST_SECONDS)
                taken = processor.seconds() - before
        found = trials_of(directory)
        assert len(found) == options.trials, f"{kind}: {len(found)} trials"
        return {PART: parts_of(found, total, taken, options.concurrent)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def parts_of(found: list[Seconds], total: float, processor: float, concurrent: int) -> Seconds:
    """The means of a sweep's trials; `total` and `processor` are the sweep's, divided by its trials."""
    names = dict.fromkeys(name for each in found for name in each)
    parts = {name: mean(each.get(name, 0.0) for each in found) for name in names}
    share = total * min(concurrent, len(found)) / len(found)
    rest = share - sum(parts.values())
    overhead = share - parts["train"]
    return {**parts, "rest": rest, "overhead": overhead, "total": total, "processor": processor}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--settle", type=float, default=SETTLE_SECONDS, help="seconds that a round waits for a calm load"
    )
    parser.add_argument("--warm", action="store_true", help="what both sides import is in the file cache already")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if not options.warm:
        warm_up()
    found: dict[str, list[dict[str, Seconds]]] = {"ours": [], "bare": []}
    loads: list[float] = []
    for number in range(1, options.rounds + 1):
        loads.append(settle(options.settle))
        for kind in ("ours", "bare") if number % 2 else ("bare", "ours"):
            found[kind].append(run_once(kind, number, options))
            trial = found[kind][-1][PART]
            print(
                f"round {number}, which began at a load of {loads[-1]}, {kind}: {trial['total']:.1f} s "
                f"({trial['processor']:.1f} s of processor time), of a trial {trial['train']:.1f} s to train and "
                f"{trial['overhead']:.1f} s of overhead",
                flush=True,
            )
    columns = list(dict.fromkeys(name for rounds in found.values() for each in rounds for name in each[PART]))
    rows, ratios, counts = table(found, PART, columns), ratios_of(found, PART), which_counts(loads)
    show(PART, rows, ratios, counts, columns)
    if options.out is not None:
        about = {name: getattr(options, name) for name in ("trials", "concurrent", "workers")}
        write_result(
            options.out,
            {**about, "steps": STEPS, "loads": loads, "counts": counts, "rounds": found, **rows, "ratios": ratios},
        )


if __name__ == "__main__":
    main()
