"""The demo with moments in 8 bits and in bf16, beside fp32: how far from its loss do they end?

    python -m benchmarks.optimizers [--seeds 7 8 9] [--out benchmarks/results/optimizers.json]

A run is the demo's recipe (a tiny Llama in fp32 on 181 conversations) on one rank, with another seed each time: other
first weights, another order. After the recipe's 40 epochs the conversations are known by heart, and the loss depends on
every digit on the way; so there are shorter runs as well, which end while there is something to learn, and a run whose
learning rate is a millionth higher, which shows how far apart two runs end that nobody would tell apart. Compared are
the loss at the end on the conversations that are held out, and the mean training loss of the last epoch. Exits with 1
when 8 bits end more than 0.5 % off the held-out loss of fp32, by the mean over the seeds, after 12 epochs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from raytune_fsdp import FinetuneConfig, finetune
from raytune_fsdp.config.load import load_config
from raytune_fsdp.record.jsonl import read_evaluations, read_trajectory

BOUND = 0.005
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw"},
    "8bit": {"type": "adamw", "moments": "8bit"},
    "bf16": {"type": "adamw", "moments": "bf16"},
    "nudged": {"type": "adamw"},
}
COMPARED = tuple(kind for kind in KINDS if kind != "adamw")
NUDGE = 1 + 1e-6
"""Of the learning rate."""

EPOCHS, JUDGED = (4, 12, 40), 12


def demo(directory: Path, kind: str, seed: int, epochs: int) -> FinetuneConfig:
    """The recipe, without answers to questions, saves and exports in between."""
    values = load_config("demo").model_dump()
    values["run"] |= {"name": f"{kind}-{seed}-{epochs}", "storage": str(directory), "seed": seed}
    values["optim"]["optimizer"] = KINDS[kind]
    values["optim"]["lr"] *= NUDGE if kind == "nudged" else 1
    values["train"]["epochs"] = float(epochs)
    values["eval"] |= {"prompts": [], "every": None, "at_start": False}
    values["checkpoint"]["every"] = 100_000
    values["tracking"] |= {"console": False, "mlflow": {"enabled": False}}
    values["cluster"] |= {"launch": "local", "workers": 1, "device": "cpu"}
    values["export"]["at_end"] = False
    return FinetuneConfig.model_validate(values)


def losses(directory: Path, kind: str, seed: int, epochs: int) -> dict[str, float]:
    config = demo(directory, kind, seed, epochs)
    record = finetune(config).run_dir / "metrics.jsonl"
    steps = read_trajectory(record)
    last = [step["loss"] for step in steps[-len(steps) // epochs :]]
    held_out = read_evaluations(record, len(steps))[len(steps)]["eval/heldout/loss"]
    return {"held_out": held_out, "last_epoch": sum(last) / len(last), "steps": len(steps)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--epochs", type=int, nargs="+", default=EPOCHS)
    parser.add_argument("--kinds", nargs="+", choices=COMPARED, default=[*COMPARED], help="beside adamw")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizers.json")
    arguments = parser.parse_args()
    kinds = ["adamw", *arguments.kinds]
    found: dict[int, dict[str, list[dict[str, float]]]] = {e: {kind: [] for kind in kinds} for e in arguments.epochs}
    with tempfile.TemporaryDirectory() as name:
        for epochs in arguments.epochs:
            for seed in arguments.seeds:
                for kind in kinds:
                    found[epochs][kind].append(losses(Path(name), kind, seed, epochs))
                    print(f"{epochs} epochs, seed {seed}, {kind}: {found[epochs][kind][-1]}", flush=True)
    off = {epochs: _off(runs) for epochs, runs in found.items()}
    for epochs, compared in off.items():
        for kind, values in compared.items():
            for what, each in values.items():
                shown = "  ".join(f"{100 * value:+.2f} %" for value in each)
                print(f"{epochs:2} epochs  {kind:6} {what:11} {shown}")
    write_result(
        arguments.out,
        {"seeds": arguments.seeds, "bound": BOUND, "relative_to_adamw": off, "runs": found},
    )
    if JUDGED not in found or "8bit" not in kinds:
        return 0
    mean = {kind: sum(run["held_out"] for run in runs) for kind, runs in found[JUDGED].items()}
    return 0 if abs(mean["8bit"] / mean["adamw"] - 1) <= BOUND else 1


def _off(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """How much each loss is off AdamW's, relative, by kind and seed."""
    return {
        kind: {
            what: [one[what] / base[what] - 1 for one, base in zip(each, runs["adamw"], strict=True)]
            for what in ("held_out", "last_epoch")
        }
        for kind, each in runs.items()
        if kind != "adamw"
    }


if __name__ == "__main__":
    sys.exit(main())
