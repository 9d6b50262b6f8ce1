"""How long the planner says that a step takes on this machine, once it is calibrated, beside real steps of real ranks.

    python -m benchmarks.planned_time [--only NAME ...] [--out benchmarks/results/planned_time.json]

The cases are those of `planned_memory`, but not its meshes: over gloo what ranks send each other inside of layers is
copied by the same cores that compute. For each number of ranks the machine is calibrated as `raytune-fsdp plan
--calibrate` does it, with one thread a rank; then every case with so many ranks is planned from its config, and
trained: assembled as a run assembles it, on full batches, one step that is not counted and the median of those that
follow. With four ranks on two cores all take turns, in calibration and in training.

`AFTER` has two cases more, chosen when planner and script were done; nothing was changed after they had run. Needs a
machine that does nothing else. Prints the table of docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.planned_memory import CASES, CPU, _step, config_of
from benchmarks.ranks import run_ranks, slowest
from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.calibrate import calibrate
from raytune_fsdp.predict.devices import Calibration, device_of, read_calibration, write_calibration
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import full_batches
from raytune_fsdp.run.assemble import assemble
from tests.runs import prepare_on_rank0

AFTER: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "15M Qwen3, IA3, accumulated": (
        2,
        {
            "model_type": "qwen3",
            "vocab_size": 8192,
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 2048,
        },
        {
            "parallel": {"precision": "bf16", "activation_checkpointing": "selective"},
            "method": {"type": "ia3"},
            "train": {"global_batch": 16},
        },
    ),
    "35M Mistral, long samples": (
        1,
        {
            "model_type": "mistral",
            "vocab_size": 16384,
            "hidden_size": 512,
            "intermediate_size": 1792,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
        },
        {"parallel": {"precision": "fp32", "activation_checkpointing": "full"}, "seq_len": 1536},
    ),
}

ALL = {name: case for name, case in CASES.items() if "mesh" not in case[2]["parallel"]} | AFTER

WITHIN = 0.25
_STEPS, _SECONDS = 5, 6.0


def planned(config: FinetuneConfig, world: int, calibration: Calibration) -> dict[str, float]:
    cluster = Cluster(device=device_of(calibration), per_node=world)
    seconds = predict(ModelSpec.of(config), config, resolve(config, world), cluster).seconds
    return {"step": seconds.step, "compute": seconds.compute, "moving": seconds.moving, "update": seconds.update}


def measured(values: Mapping[str, Any], path: str) -> None:
    """On every rank: seconds of steps, each on the slowest of them."""
    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    parts = assemble(config, prepared, standing, CPU)
    parts.optimizer.init_state()
    batches = full_batches(config, prepared.hf_config, parts.plan.division.full_rounds)
    seconds: list[float] = []
    while len(seconds) <= _STEPS or (sum(seconds) < _SECONDS and len(seconds) < 100):
        torch.distributed.barrier()
        began = time.perf_counter()
        _step(parts, batches)
        seconds.append(slowest(time.perf_counter() - began))
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(seconds[1:]))


def compare(name: str, calibration: Calibration, directory: Path) -> dict[str, Any]:
    world, architecture, sections = ALL[name]
    config = config_of(directory, architecture, sections, world)
    said = planned(config, world, calibration)
    run_ranks(measured, world, config.model_dump(exclude_unset=True), str(directory / "measured.json"))
    seconds = json.loads((directory / "measured.json").read_text())
    step = median(seconds)
    row = {
        "world": world, "later": name in AFTER, "planned": said, "measured": step, "least": min(seconds),
        "most": max(seconds), "difference": said["step"] / step - 1,
    }  # fmt: skip
    print(
        f"{name:32} {world} ranks: {1000 * step:8.1f} ms ({1000 * min(seconds):.1f} to {1000 * max(seconds):.1f}), "
        f"planned {1000 * said['step']:8.1f} ms ({row['difference']:+.1%}): computing {1000 * said['compute']:.1f}, "
        f"moving {1000 * said['moving']:.1f}, updating {1000 * said['update']:.1f}",
        flush=True,
    )
    return row


def row_of(name: str, row: Mapping[str, Any]) -> str:
    """A line of the table in docs/results.md."""
    said = row["planned"]
    numbers = (
        said["compute"],
        said["moving"],
        said["update"],
        said["step"],
        row["measured"],
        row["least"],
        row["most"],
    )
    cells = " | ".join(f"{1000 * each:,.1f}" for each in numbers)
    later = ", later" if row["later"] else ""
    return f"| {name}{later} | {row['world']} | {cells} | {row['difference']:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL, default=[*ALL])
    parser.add_argument(
        "--calibrations", type=Path, help="a directory with those of an earlier call, or for this one's"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    reached: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        kept = arguments.calibrations or Path(scratch)
        for world in sorted({ALL[name][0] for name in arguments.only}):
            file = kept / f"ranks-{world}.json"
            if not file.exists():
                write_calibration(calibrate(world, threads=1), file)
            calibration = read_calibration(file)
            reached[str(world)] = dict(calibration.reached)
            print(f"{world} ranks reach {reached[str(world)]} of their kernels", flush=True)
            for name in (each for each in arguments.only if ALL[each][0] == world):
                with tempfile.TemporaryDirectory() as directory:
                    rows[name] = compare(name, calibration, Path(directory))
    if arguments.out:
        what = (
            "seconds of a step: planned from the config and a calibration of the machine, and of real steps over gloo"
        )
        write_result(arguments.out, {"what": what, "reached": reached, "cases": rows})
    print("\n".join(row_of(name, rows[name]) for name in arguments.only))
    off = [name for name, row in rows.items() if abs(row["difference"]) > WITHIN]
    if off:
        raise SystemExit(f"off by more than {WITHIN:.0%}: {', '.join(off)}")


if __name__ == "__main__":
    main()
