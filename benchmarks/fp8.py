"""The demo in fp8 beside bf16: how far apart are their losses, and those of one and two ranks?

    python -m benchmarks.fp8 [--rates third recipe] [--seeds 7 8 9] [--steps 200] [--directory DIR] [--out FILE]

A run is so many steps of the demo's recipe (a tiny Llama on 181 conversations) on one rank, with another seed each
time: other first weights, another order. On a CPU 8 bits are emulated: numbers are rounded as a GPU rounds them, and
multiplied in 32 bits. Two runs beside them say what a distance means: *nudged* is bf16 with a learning rate that is a
millionth higher, so how far apart two runs end that nobody would tell apart, and fp32 is what bf16 itself is off.

At the recipe's learning rate (3e-3) the conversations are learned by heart in 200 steps, and all of those runs go
apart. So there is a third of that, too, where they do not. Compared with bf16 of the same seed are the mean loss of
all steps, that of each quarter of them, and the loss on the conversations that are held out. Exits with 1 if the mean
loss of all steps, and of all seeds, is more than 1 % off at a third of the rate. Prints the table of docs/results.md.

*Worlds* are one rank and two of the same run at a third of the rate, by the largest difference of a step's loss.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import installed, write_result
from raytune_fsdp import FinetuneConfig, finetune
from raytune_fsdp.config.load import load_config
from raytune_fsdp.record.jsonl import read_evaluations, read_trajectory

BOUND = 0.01
PARTS = 4
RATES = {"third": 1 / 3, "recipe": 1.0}
"""Of the recipe's learning rate."""
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "tensorwise": {"precision": "fp8"},
    "rowwise": {"precision": "fp8", "fp8_scaling": "rowwise"},
}
FP8 = ("tensorwise", "rowwise")
COMPARED = ("nudged", "fp32", *FP8)
NUDGE = 1 + 1e-6


def demo(directory: Path, rate: str, kind: str, seed: int, steps: int, ranks: int) -> FinetuneConfig:
    """The recipe, without answers to questions, saves and exports in between."""
    values = load_config("demo").model_dump()
    values["run"] |= {"name": f"{rate}-{kind}-{seed}-{ranks}", "storage": str(directory), "seed": seed}
    values["parallel"] |= KINDS["bf16" if kind == "nudged" else kind]
    values["optim"]["lr"] *= RATES[rate] * (NUDGE if kind == "nudged" else 1)
    values["train"] |= {"epochs": None, "max_steps": steps}
    values["eval"] |= {"prompts": [], "every": None, "at_start": False}
    values["checkpoint"]["every"] = 100_000
    values["tracking"] |= {"console": False, "mlflow": {"enabled": False}}
    values["cluster"] |= {"launch": "local", "workers": ranks, "device": "cpu"}
    values["export"]["at_end"] = False
    return FinetuneConfig.model_validate(values)


def run(directory: Path, rate: str, kind: str, seed: int, steps: int, ranks: int = 1) -> dict[str, Any]:
    record = finetune(demo(directory, rate, kind, seed, steps, ranks)).run_dir / "metrics.jsonl"
    losses = [step["loss"] for step in read_trajectory(record)]
    found = {"losses": losses, "held_out": read_evaluations(record, steps)[steps]["eval/heldout/loss"]}
    print(
        f"{rate}, seed {seed}, {kind} on {ranks}: {mean(losses):.4f}, held out {found['held_out']:.4f}",
        flush=True,
    )
    return found


def off(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """How much losses are off those of bf16, relative."""
    size = len(base["losses"]) // PARTS
    parts = [slice(start, start + size) for start in range(0, PARTS * size, size)]
    return {
        "mean": mean(found["losses"]) / mean(base["losses"]) - 1,
        "quarters": [mean(found["losses"][part]) / mean(base["losses"][part]) - 1 for part in parts],
        "held_out": found["held_out"] / base["held_out"] - 1,
    }


def compare(
    directory: Path, rate: str, kinds: list[str], seeds: list[int], steps: int
) -> dict[str, list[dict[str, Any]]]:
    """By kind, and of each seed."""
    compared: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for seed in seeds:
        base = run(directory, rate, "bf16", seed, steps)
        for kind, each in compared.items():
            each.append(off(run(directory, rate, kind, seed, steps), base))
    for kind, each in compared.items():
        for seed, values in zip(seeds, each, strict=True):
            parts = "  ".join(f"{value:+.2%}" for value in values["quarters"])
            print(f"{rate:6} {kind:10} seed {seed}: all steps {values['mean']:+.2%}, quarters {parts}, "
                  f"held out {values['held_out']:+.2%}", flush=True)  # fmt: skip
    return compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=[*RATES])
    parser.add_argument("--kinds", nargs="+", choices=COMPARED, default=[*COMPARED], help="beside bf16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--alone", action="store_true", help="without the runs on two ranks")
    parser.add_argument("--directory", type=Path, help="for its runs; those that are there already are not made again")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fp8.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kept = arguments.directory or Path(name)
        found = {
            rate: compare(kept, rate, arguments.kinds, arguments.seeds, arguments.steps) for rate in arguments.rates
        }
        kinds = [] if arguments.alone else [*KINDS]
        worlds = {kind: _apart(kept, kind, arguments.seeds[0], arguments.steps) for kind in kinds}
    print("largest difference of a step's loss, one rank and two:", worlds)
    write_result(
        arguments.out,
        {"torchao": installed("torchao"), "seeds": arguments.seeds, "steps": arguments.steps, "bound": BOUND,
         "relative_to_bf16": found, "worlds": worlds},
    )  # fmt: skip
    print(*rows_of(found), sep="\n")
    judged = [runs for kind, runs in found.get("third", {}).items() if kind in FP8]
    return 0 if all(abs(of_seeds(runs)) <= BOUND for runs in judged) else 1


def of_seeds(runs: list[dict[str, Any]]) -> float:
    """The mean loss of all steps, relative to bf16's, on average."""
    return mean(run["mean"] for run in runs)


def rows_of(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """Of each rate and kind: the mean loss of all steps by seed and their mean, that of the last quarter, and what is
    held out."""
    rows = []
    for rate, kinds in found.items():
        for kind, runs in kinds.items():
            ways = ([run["mean"] for run in runs], [run["quarters"][-1] for run in runs], [r["held_out"] for r in runs])
            cells = [", ".join(f"{100 * value:+.2f}" for value in values) for values in ways]
            cells.insert(1, f"{100 * of_seeds(runs):+.2f}")
            rows.append(f"| {rate}, {kind} | {' | '.join(f'{cell} %' for cell in cells)} |")
    return rows


def _apart(directory: Path, kind: str, seed: int, steps: int) -> float:
    """The run on one rank is there already, and returns what it has."""
    one, two = (run(directory, "third", kind, seed, steps, ranks=ranks) for ranks in (1, 2))
    return max(abs(a - b) / abs(a) for a, b in zip(one["losses"], two["losses"], strict=True))


if __name__ == "__main__":
    sys.exit(main())
