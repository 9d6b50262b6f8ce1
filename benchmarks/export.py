"""What an export costs: time and memory, beside gathering the weights on rank 0 and saving them there.

    python -m benchmarks.export [--rounds 5] [--out benchmarks/results/export.json]

A checkpoint of two ranks of a Llama with 468 million parameters in fp32 (1.9 GB), in the file cache, becomes bf16 in
files of 250 MB, fsynced, on this machine.

- ours, writing: `model.export` without reading the files again
- ours, with checking: the hashes of the checkpoint are compared with its manifest, the export is written and read again
- gather: two ranks that hold the model bring it together on rank 0 (get_model_state_dict, full_state_dict), which saves
  it with save_pretrained in bf16 and fsyncs it; loading the model to the ranks is not counted
- raw write: as many bytes with write(2), fsynced

Memory is RssAnon above what was there before, of an export in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.load import MIB, Peak
from benchmarks.ranks import mesh, run_ranks, slowest
from benchmarks.record import write_result
from raytune_fsdp.checkpoint.catalogue import Keep, committed
from raytune_fsdp.checkpoint.model_files import find_checkpoint
from raytune_fsdp.checkpoint.saver import open_saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import ExportConfig, OptimConfig, ParallelConfig
from raytune_fsdp.model.directory.tensorfile import TensorFile
from raytune_fsdp.plan.run_dir import MODEL_FILES
from raytune_fsdp.run.publish import publish
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.parallel import shard, sharding_units

WORLD = 2
FILE_BYTES = 250_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--out", type=Path)
    found = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        times = Path(directory) / "times.json"
        run_ranks(measure, WORLD, times, found.layers, found.rounds)
        report(**json.loads(times.read_text()), peak=peak_of_export(Path(directory)), out=found.out)


def measure(times: Path, layers: int, rounds: int) -> None:
    bench = Bench(times.parent, layers)
    rows = [bench.round(number) for number in range(rounds)]
    if dist.get_rank() == 0:
        times.write_text(json.dumps({"rows": rows, "about": bench.about}))


class Bench:
    """A model on two ranks, its checkpoint, and the ways to get the whole of it into files."""

    def __init__(self, directory: Path, layers: int) -> None:
        self.directory = directory
        torch.manual_seed(0)
        self.config = LlamaConfig(
            vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(self.config)
        parameters = sum(p.numel() for p in self.model.parameters())
        self.about = {"parameters": parameters, "bytes": 2 * parameters, "file_bytes": FILE_BYTES, "ranks": WORLD}
        config = ParallelConfig(precision="fp32")
        shard(self.model, mesh(), config, sharding_units(self.model, config, ends=True))
        run = directory / "run"
        if dist.get_rank() == 0:
            self.config.architectures = ["LlamaForCausalLM"]
            self.config.save_pretrained(run / MODEL_FILES)
        saver = open_saver(
            str(run / "checkpoints"), self.model, build_optimizer(self.model, OptimConfig(lr=1e-4)), attempt=1,
            keep=Keep(last=None), seconds=600, asynchronous=False, scores={},
        )  # fmt: skip
        saver.begin(RunState(step=1, attempt=1), before=lambda: None)
        outcome = saver.finish()
        assert outcome is not None and outcome.saved is not None, outcome
        saver.leave()
        (self.checkpoint,) = committed(str(run / "checkpoints"))

    def round(self, number: int) -> dict[str, float]:
        ways: dict[str, Callable[[Path], None]] = {
            "writing": self.writing,
            "with_checking": self.with_checking,
            "gather": self.gather,
            "raw_write": self.raw_write,
        }
        names = list(ways)
        turn = number % len(names)
        row = {}
        for name in names[turn:] + names[:turn]:
            place = self.directory / f"{name}-{number}"
            os.sync()
            dist.barrier()
            started = time.perf_counter()
            if name == "gather" or dist.get_rank() == 0:
                ways[name](place)
            row[name] = slowest(time.perf_counter() - started)
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
        if dist.get_rank() == 0:
            print({name: round(value, 2) for name, value in row.items()}, flush=True)
        return row

    def writing(self, place: Path) -> None:
        with patch.object(TensorFile, "differences", return_value=[]):
            publish(self.checkpoint, place, ExportConfig(max_file_bytes=FILE_BYTES), verified=True)

    def with_checking(self, place: Path) -> None:
        publish(find_checkpoint(self.checkpoint.path), place, ExportConfig(max_file_bytes=FILE_BYTES), verified=True)

    def gather(self, place: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(self.model, options=options)
        if dist.get_rank() == 0:
            with torch.device("meta"):
                model = LlamaForCausalLM(self.config)
            half = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
            model.save_pretrained(place, state_dict=half, max_shard_size=FILE_BYTES)
            for file in place.iterdir():
                with open(file, "rb+") as opened:
                    os.fsync(opened.fileno())

    def raw_write(self, place: Path) -> None:
        place.mkdir()
        content = memoryview(bytes(64 * MIB))
        with open(place / "raw", "wb", buffering=0) as file:
            for start in range(0, self.about["bytes"], len(content)):
                file.write(content[: self.about["bytes"] - start])
            os.fsync(file.fileno())


def peak_of_export(directory: Path) -> int:
    """Of an export in a new process."""
    out = directory / "peak.json"
    run_ranks(_measure, 1, directory, out)
    return int(json.loads(out.read_text()))


def _measure(directory: Path, out: Path) -> None:
    (checkpoint,) = committed(str(directory / "run" / "checkpoints"))
    peak = Peak()
    with peak:
        publish(checkpoint, directory / "measured", ExportConfig(max_file_bytes=FILE_BYTES))
    out.write_text(json.dumps(peak.bytes))


def report(rows: list[dict[str, float]], about: dict[str, Any], peak: int, out: Path | None) -> None:
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    ratios = {
        "writing / gather": middle["writing"] / middle["gather"],
        "with checking / gather": middle["with_checking"] / middle["gather"],
        "memory / file": peak / FILE_BYTES,
    }
    print(f"\n{about}")
    for name, value in middle.items():
        print(f"{name:16} {value:7.2f} s")
    print(f"{'memory':16} {peak / MIB:7.0f} MiB")
    for name, ratio in ratios.items():
        print(f"{name:24} {ratio:6.3f}")
    if out is not None:
        result = {**about, "rounds": len(rows), "median_seconds": middle, "peak_bytes": peak, "ratios": ratios}
        write_result(out, {**result, "all": rows})


if __name__ == "__main__":
    main()
