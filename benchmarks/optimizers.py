"""The demo with moments in 8 bits and in bf16, beside AdamW: how far from its loss do they end?

    python -m benchmarks.optimizers [--seeds 7 8 9] [--out benchmarks/results/optimizers.json]

A run is the demo's recipe (a tiny Llama in fp32 on 181 conversations, 40 epochs) on one rank, with another seed each
time: other first weights, another order. Compared are, at the end, the loss on the conversations that are held out and
the mean training loss of the last epoch. Exits with 1 when the held-out loss of 8 bits is more than 0.5 % off AdamW's
for one of the seeds.
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
from raytune_fsdp.tracking.jsonl import read_evaluations, read_trajectory

BOUND = 0.005
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw"},
    "8bit": {"type": "adamw", "moments": "8bit"},
    "bf16": {"type": "adamw", "moments": "bf16"},
}


def demo(directory: Path, kind: str, seed: int) -> FinetuneConfig:
    """The recipe, without answers to questions, saves and exports in between."""
    values = load_config("demo").model_dump()
    values["run"] |= {"name": f"{kind}-{seed}", "storage": str(directory), "seed": seed}
    values["optim"]["optimizer"] = KINDS[kind]
    values["eval"] |= {"prompts": [], "every": None, "at_start": False}
    values["checkpoint"]["every"] = 100_000
    values["tracking"] |= {"console": False, "mlflow": {"enabled": False}}
    values["cluster"] |= {"launch": "local", "workers": 1, "device": "cpu"}
    values["export"]["at_end"] = False
    return FinetuneConfig.model_validate(values)


def losses(directory: Path, kind: str, seed: int) -> dict[str, float]:
    config = demo(directory, kind, seed)
    record = finetune(config).run_dir / "metrics.jsonl"
    steps = read_trajectory(record)
    last = [step["loss"] for step in steps[-len(steps) // 40 :]]
    held_out = read_evaluations(record, len(steps))[len(steps)]["eval/heldout/loss"]
    return {"held_out": held_out, "last_epoch": sum(last) / len(last), "steps": len(steps)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizers.json")
    arguments = parser.parse_args()
    found: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        for seed in arguments.seeds:
            for kind in KINDS:
                found[kind][seed] = losses(Path(name), kind, seed)
                print(f"seed {seed}, {kind}: {found[kind][seed]}", flush=True)
    off = {
        kind: {
            what: [found[kind][seed][what] / found["adamw"][seed][what] - 1 for seed in arguments.seeds]
            for what in ("held_out", "last_epoch")
        }
        for kind in KINDS
        if kind != "adamw"
    }
    for kind, values in off.items():
        for what, each in values.items():
            print(f"{kind:6} {what:11} {'  '.join(f'{100 * value:+.3f} %' for value in each)}")
    write_result(arguments.out, {"runs": found, "relative_to_adamw": off, "bound": BOUND})
    return 0 if all(abs(value) <= BOUND for value in off["8bit"]["held_out"]) else 1


if __name__ == "__main__":
    sys.exit(main())
