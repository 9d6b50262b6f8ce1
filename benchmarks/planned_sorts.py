"""Where the seconds of a planned step go: by part of the step, and by sort of operation.

    python -m benchmarks.planned_sorts [--only LoRA] [--out benchmarks/results/planned_sorts.json]

An 8B: in full on eight H100 at 8,192 tokens a sample, everything computed again, in bf16 and in fp8; with LoRA on one
at two samples of 4,096, nothing computed again. Seconds are those that the planner adds up, and nothing is measured
here (raytune_fsdp/predict/speed.py): forward and backward at the share of the roofline that real steps reach,
collectives, and the update of the weights.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.prediction import Cluster, predict_from, traced
from raytune_fsdp.predict.speed import of_all_passes, phases_of, rates_of
from raytune_fsdp.predict.subject import ModelSpec, bundled
from raytune_fsdp.step.precision import compute_dtype

TOKENS = 8192
"""Of a micro-batch."""
FULL, NONE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "none"}
IN_8_BITS = {"optimizer": {"type": "adamw", "moments": "8bit"}}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "8 H100, full, bf16": (8, 1, {"parallel": FULL}),
    "8 H100, full, bf16, moments in 8 bits": (8, 1, {"parallel": FULL, "optim": IN_8_BITS}),
    "8 H100, full, fp8": (8, 1, {"parallel": {**FULL, "precision": "fp8"}}),
    "8 H100, full, fp8, not compiled": (8, 1, {"parallel": {**FULL, "precision": "fp8", "compile": False}}),
    "1 H100, LoRA, bf16": (1, 2, {"parallel": NONE, "method": {"type": "lora", "rank": 16, "alpha": 32}}),
}
"""Ranks, samples of a micro-batch, and what is in the config besides."""


def config_of(case: str) -> FinetuneConfig:
    ranks, samples, sections = CASES[case]
    return FinetuneConfig.model_validate({
        "run": {"name": "planned"},
        "model": {
            "init": "random", "tokenizer": "none", "architecture": bundled()["meta-llama/Llama-3.1-8B"]["config"]
        },
        "data": {"train": [{"path": "rows.jsonl"}], "seq_len": TOKENS // samples},
        "train": {"max_steps": 1, "global_batch": ranks * samples, "micro_batch": samples},
        **sections,
        "parallel": {"precision": "bf16", "compile": True, **sections["parallel"]},
    })  # fmt: skip


def planned(case: str) -> dict[str, Any]:
    """Return the seconds of a step, and those of each part and sort of operation; and how many operations there are."""
    ranks, config = CASES[case][0], config_of(case)
    precision = config.parallel.precision
    spec, plan = ModelSpec.of(config), resolve(config, ranks)
    cluster = Cluster(device=find_device("H100-80GB"), per_node=8, between=50e9)
    trace = traced(spec, config, plan, cluster)
    found = predict_from(trace, config, plan, cluster)
    assert found.seconds is not None
    rates = rates_of(
        cluster.device, compiled=config.parallel.compile is True, tf32=config.parallel.tf32,
        itemsize=compute_dtype(precision).itemsize, narrow=precision == "fp8",
    )  # fmt: skip
    phases, passes = dict(phases_of(trace)), plan.division.full_rounds
    seconds: dict[str, float] = {}
    counts: dict[str, float] = {}
    for part in ("pass", "forward", "head", "backward"):  # `pass`: what comes before the first layer
        own = {name: each if name.startswith(part) else [] for name, each in phases.items()}
        for sort in sorted({each.sort for operations in own.values() for each in operations}):
            of_sort = {name: [each for each in operations if each.sort == sort] for name, operations in own.items()}
            in_all = of_all_passes(trace, {name: rates.seconds(each) for name, each in of_sort.items()}, passes)
            number = of_all_passes(trace, {name: float(len(each)) for name, each in of_sort.items()}, passes)
            seconds[f"{part}, {sort}"], counts[f"{part}, {sort}"] = in_all / rates.reached, number
    whole = found.seconds
    assert abs(sum(seconds.values()) + whole.exposed + whole.update - whole.step) < 0.001 * whole.step
    return {
        "step": whole.step, "tokens_a_second_and_device": TOKENS / whole.step, "update": whole.update,
        "collectives": whole.moving, "not_hidden": whole.exposed,
        "forward_and_backward": {name: each for name, each in seconds.items() if each},
        "operations": {name: each for name, each in counts.items() if each},
        "needed_gib": found.needed / 2**30,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases with this word in their name")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = defaultdict(dict)
    for case in CASES:
        if arguments.only in case:
            result[case] = planned(case)
            print(case, {name: each for name, each in result[case].items() if not isinstance(each, dict)}, flush=True)
            for name, each in result[case]["forward_and_backward"].items():
                print(f"    {name:30} {1000 * each:8.1f} ms, {result[case]['operations'][name]:8.0f} operations")
    if arguments.out:
        write_result(arguments.out, {"what": "seconds of a planned step", "tokens": TOKENS, "cases": dict(result)})


if __name__ == "__main__":
    main()
