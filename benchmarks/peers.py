"""What peer copies cost: the time of a step with them, beside the same step without, on two and four ranks.

    python -m benchmarks.peers [--worlds 2 4] [--rounds 7] [--seconds 60] [--out benchmarks/results/peers.json]

One run of a world: its ranks train on, and copies by the clock (`checkpoint.peer_every: null`) are on for some time and
off for as long, in turns. A round is one of each; its figure is the wall time of a step while they are on, with all
that copies hold up, over that while they are off. The clock of the copies stands still while they are off, and nothing
is being written when that begins. Ranks are processes of a Ray on this machine, half of them beside each of two
keepers, which are processes of their own: what goes to another node goes to the other keeper, over no network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.attention import ARCHITECTURE, write_rows
from benchmarks.record import write_result
from raytune_fsdp.demo import TOKENIZER

LENGTH = 512
NODES = ("a", "b")
WARM_STEPS = 5


def config_of(directory: Path, world: int) -> dict[str, Any]:
    rows = {"path": str(directory / "rows.jsonl"), "format": {"type": "tokens", "labels": None}}
    return {
        "run": {"name": f"peers-{world}", "storage": str(directory)},
        "model": {"init": "random", "architecture": ARCHITECTURE, "tokenizer": str(TOKENIZER)},
        "data": {"train": [rows], "seq_len": LENGTH},
        "parallel": {"precision": "fp32"},
        "optim": {"lr": 1e-4, "warmup_steps": 0, "schedule": {"type": "constant"}},
        "train": {"global_batch": 4, "micro_batch": 1, "max_steps": 1_000_000},
        "checkpoint": {"every": None, "peer_copies": 1},
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "cluster": {"device": "cpu"},
        "export": {"at_end": False},
    }


class Turns:
    """Rank 0 turns copies on and off, and counts; asked before each step. It is a clock, too, which stands still while
    they are off."""

    def __init__(self, rounds: int, seconds: float) -> None:
        self._left, self._seconds = 2 * rounds, seconds
        self._steps, self._since, self._still, self._off_since = -WARM_STEPS, time.monotonic(), 0.0, time.monotonic()
        self.on = False
        self.copies = 0
        self.found: list[tuple[bool, float, int]] = []
        """Whether copies were on, seconds of a step, and copies."""

    def monotonic(self) -> float:
        return (time.monotonic() if self.on else self._off_since) - self._still

    def step(self, copying: bool) -> bool:
        """Count a step; return whether it was the last one. `copying`: the end of a copy is not yet known."""
        self._steps += 1
        now = time.monotonic()
        if self._steps <= 0:
            self._since = now
        writing = copying or any(thread.name.startswith("save-") for thread in threading.enumerate())
        if self._steps <= 0 or now - self._since < self._seconds or writing:
            return False
        self.found.append((self.on, (now - self._since) / self._steps, self.copies))
        if self.on:
            self._off_since = now
        else:
            self._still += now - self._off_since
        self.on, self._since, self._steps, self.copies = not self.on, now, 0, 0
        return len(self.found) == self._left


def train(
    values: Mapping[str, Any], rank: int, world: int, store: str, keepers: Mapping[str, Any], turns: tuple[int, float]
) -> list[tuple[bool, float, int]]:
    """A rank of the run. Returns what rank 0 has counted."""
    import torch
    import torch.distributed as dist

    from raytune_fsdp.base.batch import StopReason
    from raytune_fsdp.base.errors import Interrupted
    from raytune_fsdp.checkpoint.location import hold, new_location
    from raytune_fsdp.checkpoint.peers import clock
    from raytune_fsdp.checkpoint.peers.storage import PeerStorage
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.launch.ray.keepers import KeepersOnRay
    from raytune_fsdp.run import loop
    from raytune_fsdp.run.assemble import LauncherHooks, assemble
    from tests.runs import prepare_on_rank0

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    config, own, given_up = FinetuneConfig.model_validate(values), NODES[rank % 2], threading.Event()
    storage = PeerStorage(
        new_location(), KeepersOnRay(keepers, (), given_up), NODES,
        own=own, count=config.checkpoint.peer_copies, given_up=given_up,
    )  # fmt: skip
    hold(storage)
    counted = Turns(*turns)
    clock.time = counted  # type: ignore[assignment,attr-defined]  # in place of its module `time`
    parts = assemble(config, *prepare_on_rank0(config), torch.device("cpu"), LauncherHooks(peers=storage))
    copies = parts.saves.copies
    assert copies is not None
    own_clock = copies.clock

    def stop() -> StopReason | None:
        if rank:
            return None
        assert own_clock is not None
        over = counted.step(own_clock._copying)
        copies.clock = own_clock if counted.on else None
        return StopReason.SIGNAL if over else None

    begin = copies.storage.draft

    def drafted(name: str, serial: int) -> Any:
        counted.copies += 1
        return begin(name, serial)

    copies.storage.draft = drafted  # type: ignore[method-assign]
    try:
        loop.train(parts, stop)
    except Interrupted:
        parts.saves.leave()
        parts.tracker.finish("interrupted")
    dist.destroy_process_group()
    return counted.found


def compared(directory: Path, world: int, rounds: int, seconds: float) -> dict[str, Any]:
    import ray

    from raytune_fsdp.launch.ray.keepers import _KEEPER

    keepers = {node: _KEEPER.remote() for node in NODES}
    task = ray.remote(num_cpus=0, max_calls=1)(train)
    values, store = config_of(directory, world), str(directory / f"store-{world}")
    asked = [task.remote(values, rank, world, store, keepers, (rounds, seconds)) for rank in range(world)]
    found: Sequence[tuple[bool, float, int]] = ray.get(asked)[0]
    memory = ray.get([each.nbytes.remote() for each in keepers.values()])
    for each in keepers.values():
        ray.kill(each)
    off, on = ([each for each in found if each[0] == kind] for kind in (False, True))
    ratios = [a[1] / b[1] for a, b in zip(on, off, strict=True)]
    return {
        "ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "step_seconds": median(each[1] for each in off), "copies": [each[2] for each in on],
        "keeper_bytes": memory,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    import ray

    temporary = tempfile.mkdtemp(prefix="ray-")  # short: the names of sockets have a limit
    environment = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
    ray.init(
        num_cpus=1, include_dashboard=False, object_store_memory=256 << 20, _temp_dir=temporary,
        runtime_env=environment, logging_level="ERROR", log_to_driver=False,
    )  # fmt: skip
    table: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            write_rows(Path(name) / "rows.jsonl", 64 * LENGTH, longest=LENGTH)
            for world in arguments.worlds:
                found = table[str(world)] = compared(Path(name), world, arguments.rounds, arguments.seconds)
                ratios = f"{found['ratio']:.3f} ({found['ratio_min']:.3f} to {found['ratio_max']:.3f})"
                print(
                    f"{world} ranks: {found['step_seconds']:.2f} s a step; with copies {ratios} of it; "
                    f"copies in each turn: {found['copies']}",
                    flush=True,
                )
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"load {os.getloadavg()[0]:.1f}")
    if arguments.out:
        what = f"wall time of a step over gloo, with peer copies by the clock and without; {LENGTH} tokens, two keepers"
        how = {"rounds": arguments.rounds, "seconds": arguments.seconds, "load": os.getloadavg()[0]}
        write_result(arguments.out, {"what": what, **how, "worlds": table})


if __name__ == "__main__":
    main()
