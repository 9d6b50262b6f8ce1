"""What a checkpoint costs: how long training stands still, how long until it is safe, how long a resume takes.

    python -m benchmarks.checkpoint [--rounds 5] [--out benchmarks/results/checkpoint.json]

Two ranks over gloo on this machine, one thread each, a Llama of 82 million parameters in fp32 with AdamW: 984 MB of
state, half of it on each rank. All ways of saving take turns, in one run, from the same processes; every time is that
of the slower rank, from a barrier on. Everything is fsynced, and deleted again before the next one starts.

- ours: `Saver.begin` (the stall), then training steps until the outcome is known; and alone, nothing else running
- dcp.save: torch.distributed.checkpoint, in the foreground, fsynced, one thread
- dcp.async_save: the same with its thread and its process checkpointer, with torch's own staging, and a process group
  of its own
- gather: the full state dict on rank 0, torch.save, fsync
- memcpy: this rank's state into memory that is there already, one thread; the least that a stall can be
- raw write: this rank's bytes with write(2), then fsync; the least that a save can take
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ranks import mesh, run_ranks, slowest
from benchmarks.record import write_result
from raytune_fsdp.checkpoint.catalogue import Keep, committed
from raytune_fsdp.checkpoint.contents import tensors_of
from raytune_fsdp.checkpoint.reading import load_into, verify_together
from raytune_fsdp.checkpoint.save_in_flight import ENDINGS
from raytune_fsdp.checkpoint.saver import Saver, open_saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import OptimConfig, ParallelConfig
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.parallel import shard, sharding_units

WORLD = 2
TOKENS = 64
STEPS_WITHOUT = 4
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64 (default: 768)")
    parser.add_argument("--no-process", action="store_true", help="without the process checkpointer of dcp.async_save")
    parser.add_argument("--out", type=Path)
    found = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        run_ranks(measure, WORLD, Path(directory), found)


def measure(directory: Path, found: Any) -> None:
    bench = Bench(directory, found.layers, found.width)
    rows = [bench.round(number, process=number == 0 and not found.no_process) for number in range(found.rounds)]
    if dist.get_rank() == 0:
        report(rows, bench.about, found.out)


class Bench:
    """A model in training, and every way to save it."""

    def __init__(self, directory: Path, layers: int, width: int) -> None:
        self.directory = directory
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=16384, hidden_size=width, intermediate_size=2048, num_hidden_layers=layers,
                num_attention_heads=width // 64, num_key_value_heads=width // 64, tie_word_embeddings=False,
                use_cache=False,
            )
        )  # fmt: skip
        parameters = sum(p.numel() for p in self.model.parameters())
        config = ParallelConfig(precision="fp32")
        shard(self.model, mesh(), config, sharding_units(self.model, config, ends=True))
        self.optimizer = build_optimizer(self.model, OptimConfig(lr=1e-4))
        self.ids = torch.randint(0, 16384, (1, TOKENS))
        self.step()
        self.background = dist.new_group(backend="gloo")
        self.saver = self.open()
        mine = sum(local_piece(t).nbytes for t in self.tensors().values())
        self.room = {name: torch.zeros_like(local_piece(t)) for name, t in self.tensors().items()}
        self.about = {"parameters": parameters, "bytes_per_rank": mine, "ranks": WORLD, "tokens_per_step": TOKENS}
        self.saves = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.model, self.optimizer)

    def open(self) -> Saver:
        return open_saver(
            str(self.directory / "ours"), self.model, self.optimizer, attempt=1, keep=Keep(last=None), seconds=600,
            asynchronous=True, scores={},
        )  # fmt: skip

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step(1.0, torch.zeros(()))

    def timed(self, work: Callable[[], object]) -> float:
        """Of the slower rank, from a barrier on."""
        dist.barrier()
        started = time.perf_counter()
        work()
        return slowest(time.perf_counter() - started)

    def place(self, name: str) -> Path:
        self.saves += 1
        return self.directory / f"{name}-{self.saves}"

    def remove(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        os.sync()
        dist.barrier()

    def round(self, number: int, *, process: bool) -> Row:
        row: Row = {"step": median([self.timed(self.step) for _ in range(STEPS_WITHOUT)])}
        ways = [
            self.memcpy,
            self.raw_write,
            self.ours,
            self.ours_alone,
            self.sync,
            self.thread,
            self.gather,
            self.resume,
        ]
        if process:
            ways.append(self.process)
        turn = number % len(ways)
        for way in ways[turn:] + ways[:turn]:
            row.update(way())
        if dist.get_rank() == 0:
            print({name: round(value, 3) for name, value in row.items()}, flush=True)
        return row

    def memcpy(self) -> Row:
        def copy() -> None:
            for name, tensor in self.tensors().items():
                self.room[name].copy_(local_piece(tensor))

        return {"memcpy": self.timed(copy)}

    def raw_write(self) -> Row:
        path = self.place("raw")
        path.mkdir(exist_ok=True)
        content = torch.cat([t.reshape(-1) for t in self.room.values()]).numpy().data.cast("B")

        def write() -> None:
            with open(path / str(dist.get_rank()), "wb", buffering=0) as file:
                view = content
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())

        row = {"raw_write": self.timed(write), "hashing": self.timed(lambda: xxhash.xxh3_128_hexdigest(content))}
        self.remove(path)
        return row

    def ours(self) -> Row:
        """With training steps until it is committed. The first round is the first save of the saver."""
        self.saves += 1
        stall = self.timed(lambda: self.saver.begin(RunState(step=self.saves, attempt=1), before=lambda: None))
        started, steps, ended = time.perf_counter(), [], 0
        while not ended:
            steps.append(self.timed(self.step))
            ending, _ = self.saver.status()
            flag = torch.tensor(0 if ending is None else 1 + ENDINGS.index(ending))
            dist.all_reduce(flag)
            ended = int(flag)
        outcome = self.saver.report(ENDINGS[ended - 1])
        assert outcome.saved is not None, outcome
        seconds = slowest(time.perf_counter() - started)
        self.remove(Path(outcome.saved.path))
        return {
            "ours_stall": stall, "ours_with_steps": stall + seconds, "ours_step_while_saving": max(steps),
            "ours_steps_while_saving": float(len(steps)),
        }  # fmt: skip

    def ours_alone(self) -> Row:
        self.saves += 1

        def save() -> None:
            self.saver.begin(RunState(step=self.saves, attempt=1), before=lambda: None)
            outcome = self.saver.finish()
            assert outcome is not None and outcome.saved is not None, outcome

        row = {"ours_alone": self.timed(save)}
        for found in committed(self.saver.storage.location):
            self.remove(Path(found.path))
        return row

    def sync(self) -> Row:
        path = self.place("sync")
        row = {"dcp_save": self.timed(lambda: dcp.save(self.tensors(), storage_writer=writer(path)))}
        self.remove(path)
        return row

    def thread(self) -> Row:
        return self._asynchronous("dcp_thread", AsyncCheckpointerType.THREAD)

    def process(self) -> Row:
        """Once: its first save starts a process that imports torch."""
        first = self._asynchronous("dcp_process_first", AsyncCheckpointerType.PROCESS)
        return {**first, **self._asynchronous("dcp_process", AsyncCheckpointerType.PROCESS)}

    def _asynchronous(self, name: str, kind: AsyncCheckpointerType) -> Row:
        path = self.place(name)
        box: list[Any] = []  # for a Future: only with a stager of its own does async_save return something else

        def begin() -> None:
            found = dcp.async_save(
                self.tensors(), storage_writer=writer(path), process_group=self.background,
                async_checkpointer_type=kind,
            )  # fmt: skip
            box.append(found)

        stall = self.timed(begin)
        started, steps, done = time.perf_counter(), [], False
        while not done:
            steps.append(self.timed(self.step))
            flag = torch.tensor(int(box[0].done()))
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            done = bool(flag)
        box[0].result()
        seconds = slowest(time.perf_counter() - started)
        self.remove(path)
        return {
            f"{name}_stall": stall, f"{name}_with_steps": stall + seconds, f"{name}_step_while_saving": max(steps)
        }  # fmt: skip

    def gather(self) -> Row:
        path = self.place("gather")
        path.mkdir(exist_ok=True)

        def save() -> None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state: dict[str, Any] = dict(get_model_state_dict(self.model, options=options))
            for name, tensor in self.tensors().items():
                if name.startswith("optim."):
                    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                    state[name] = whole if dist.get_rank() == 0 else None
            if dist.get_rank() == 0:
                with open(path / "state.pt", "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())

        row = {"gather": self.timed(save)}
        self.remove(path)
        return row

    def resume(self) -> Row:
        """Both read what they have written, from the file cache."""
        path = self.place("resume")
        dcp.save(self.tensors(), storage_writer=writer(path))
        theirs = self.timed(lambda: dcp.load(self.tensors(), checkpoint_id=path))
        self.remove(path)
        self.saves += 1
        self.saver.begin(RunState(step=self.saves, attempt=1), before=lambda: None)
        self.saver.finish()
        (found,) = committed(self.saver.storage.location)

        def verified_load() -> None:
            problem = verify_together(found, hashes=True)
            assert problem is None, problem
            load_into(self.model, self.optimizer, found)

        ours = self.timed(verified_load)
        self.remove(Path(found.path))
        return {"dcp_load": theirs, "ours_load": ours}


def writer(path: Path) -> FileSystemWriter:
    return FileSystemWriter(path, thread_count=1, sync_files=True, overwrite=False)


def report(rows: list[Row], about: dict[str, Any], out: Path | None) -> None:
    names = {name: None for row in rows for name in row}
    middle = {name: median([row[name] for row in rows if name in row]) for name in names}
    later = median([row["ours_stall"] for row in rows[1:]] or [rows[0]["ours_stall"]])
    ratios = {
        "stall / memcpy": middle["ours_stall"] / middle["memcpy"],
        "stall / dcp.save": middle["ours_stall"] / middle["dcp_save"],
        "first stall / later": rows[0]["ours_stall"] / later,
        "alone / (dcp.save + hashing)": middle["ours_alone"] / (middle["dcp_save"] + middle["hashing"]),
        "step while saving / step": middle["ours_step_while_saving"] / middle["step"],
        "dcp.async_save: step while saving / step": middle["dcp_thread_step_while_saving"] / middle["step"],
        "load / dcp.load": middle["ours_load"] / middle["dcp_load"],
    }
    print(f"\n{about}")
    for name, value in middle.items():
        print(f"{name:28} {value:8.3f} s")
    for name, value in ratios.items():
        print(f"{name:44} {value:6.3f}")
    if out is not None:
        write_result(out, {**about, "rounds": len(rows), "median_seconds": middle, "ratios": ratios, "all": rows})


if __name__ == "__main__":
    main()
