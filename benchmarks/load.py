"""What it takes to bring a model's weights to the ranks: memory of each, and time.

    python -m benchmarks.load [--rounds 7] [--out benchmarks/results/load.json]

A Llama in fp32 of 468 million parameters (1.9 GB in four safetensors files, in the file cache), on two and on four
ranks over gloo on this machine, one thread each. Every way ends with the same: a network sharded by `fully_shard` in
fp32, its weights and buffers on the CPU; what is compared at the end is one tensor of the first block, gathered.

- ours, sharded and rank0: `model.fill`, with the matching of keys
- DCP: the same network, `dcp.load` with its HuggingFaceStorageReader
- transformers: from_pretrained with DistributedConfig(fsdp_size=ranks)
- naive: from_pretrained on every rank, then fully_shard
- accelerate: its fsdp2_prepare_model with cpu_ram_efficient_loading. It refuses CPUs, so it is called with a stand-in
  for its Accelerator; on GPUs the other ranks would hold less host memory

Memory is RssAnon, sampled every millisecond, above what the rank held after its imports; each way in processes of its
own, once. Time is that of the slowest rank from a barrier on, the first three ways taking turns in the same processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.ranks import mesh, run_ranks, slowest
from benchmarks.record import write_result
from raytune_fsdp.config import ModelConfig, ParallelConfig
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.fill import FillMode, fill
from raytune_fsdp.model.network import build_base, init_buffers, load_architecture
from raytune_fsdp.model.weights.keys import match_keys
from raytune_fsdp.run.starting_weights import StartingWeights
from raytune_fsdp.step.parallel import shard, sharding_units

CPU = torch.device("cpu")
MIB = 1 << 20
TRIED = "model.layers.0.self_attn.q_proj.weight"
IN_TURN = ("sharded", "rank0", "dcp")
WORLDS = (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="whose memory is measured")
    parser.add_argument("--out", type=Path)
    found = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        model = Path(directory) / "model"
        about = write_model(model, found.layers)
        print(about)
        result: dict[str, Any] = {**about, "rounds": found.rounds, "ranks": {}}
        for world in found.worlds:
            memory = {way: start(world, Path(directory), "memory", way) for way in found.ways}
            seconds = start(world, Path(directory), "time", str(found.rounds))
            result["ranks"][world] = report(world, memory, seconds, about)
    if found.out is not None:
        write_result(found.out, result)


def write_model(directory: Path, layers: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size="500MB")
    sizes = [p.numel() for p in model.parameters()]
    return {
        "parameters": sum(sizes),
        "bytes": 4 * sum(sizes),
        "largest_tensor": 4 * max(sizes),
        "files": len(list(directory.glob("*.safetensors"))),
    }


def start(world: int, directory: Path, what: str, argument: str) -> Any:
    """Run a measurement on new processes, and return what rank 0 has written."""
    out = directory / "out.json"
    run_ranks(measure, world, directory / "model", out, what, argument)
    return json.loads(out.read_text())


def measure(model: Path, out: Path, what: str, argument: str) -> None:
    logging.disable(logging.WARNING)
    ranks = mesh()
    mine = memory_of(model, ranks, argument) if what == "memory" else times_of(model, ranks, int(argument))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(everyone))


def memory_of(path: Path, mesh: DeviceMesh, way: str) -> dict[str, float]:
    """Of one way on this rank: the peak above the base, and the seconds of it."""
    dist.barrier()
    peak = Peak()
    started = time.perf_counter()
    with peak:
        model = WAYS[way](path, mesh)
    seconds = slowest(time.perf_counter() - started)
    own = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
    check(model, path)
    return {"peak": peak.bytes, "own": own, "seconds": seconds}


def times_of(path: Path, mesh: DeviceMesh, rounds: int) -> list[dict[str, float]]:
    rows = []
    for way in IN_TURN:  # what is loaded and started once is not counted
        WAYS[way](path, mesh)
        gc.collect()
    for number in range(rounds):
        turn = number % len(IN_TURN)
        row = {}
        for way in IN_TURN[turn:] + IN_TURN[:turn]:
            dist.barrier()
            started = time.perf_counter()
            model = WAYS[way](path, mesh)
            row[way] = slowest(time.perf_counter() - started)
            del model
            gc.collect()  # modules are in cycles: without it, their memory would be given back while another loads
        rows.append(row)
    return rows


def shard_whole(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    config = ParallelConfig(precision="fp32")
    shard(model, mesh, config, sharding_units(model, config, ends=True))


def ours(mode: FillMode) -> Callable[[Path, DeviceMesh], PreTrainedModel]:
    def load(path: Path, mesh: DeviceMesh) -> PreTrainedModel:
        model = network(path)
        weights = None
        if mode == "sharded" or dist.get_rank() == 0:
            files = find_weights(path)
            weights = StartingWeights(stored=files, match=match_keys(model, files), grown={}).weights(model)
        shard_whole(model, mesh)
        fill(model, weights, mode, CPU)
        return model

    return load


def with_dcp(path: Path, mesh: DeviceMesh) -> PreTrainedModel:
    model = network(path)
    shard_whole(model, mesh)
    model.to_empty(device="cpu")
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(path)))
    init_buffers(model, CPU)
    return model


def with_transformers(path: Path, mesh: DeviceMesh) -> PreTrainedModel:
    from transformers.distributed.configuration_utils import DistributedConfig

    spread = DistributedConfig(fsdp_size=mesh.size())
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=spread)
    return model


def naively(path: Path, mesh: DeviceMesh) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    shard_whole(model, mesh)
    return model


def with_accelerate(path: Path, mesh: DeviceMesh) -> PreTrainedModel:
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING="true", ACCELERATE_USE_CPU="true"
    )  # fmt: skip
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], reshard_after_forward=True,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        is_main_process=dist.get_rank() == 0,
        process_index=dist.get_rank(),
        mixed_precision="no",
        device=CPU,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("fsdp",)),
        torch_device_mesh={("fsdp",): mesh},
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prepared: PreTrainedModel = fsdp2_prepare_model(accelerator, model)
    return prepared


WAYS: dict[str, Callable[[Path, DeviceMesh], PreTrainedModel]] = {
    "sharded": ours("sharded"),
    "rank0": ours("rank0"),
    "dcp": with_dcp,
    "transformers": with_transformers,
    "naive": naively,
    "accelerate": with_accelerate,
}


def network(path: Path) -> PreTrainedModel:
    config = ModelConfig(path=str(path))
    return build_base(load_architecture(config, path), config, "fp32")


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check(model: PreTrainedModel, path: Path) -> None:
    found: Any = model.get_parameter(TRIED)
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    files = find_weights(path)
    with safe_open(path / files.file_of[TRIED], "pt") as file:
        assert torch.equal(whole.detach(), file.get_tensor(TRIED)), "other weights than in the file"


class Peak:
    """The most anonymous memory of this process while it is open, above what it had when it was made."""

    def __init__(self) -> None:
        self._base = self._most = anonymous()

    def __enter__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self._most = max(self._most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self._most, anonymous()) - self._base


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\s+(\d+) kB", status.read())[1]) * 1024  # type: ignore[index]


def report(world: int, memory: dict[str, Any], seconds: list[Any], about: dict[str, Any]) -> dict[str, Any]:
    rows = seconds[0]
    middle = {way: median(row[way] for row in rows) for way in IN_TURN}
    largest = about["largest_tensor"]
    own = [each["own"] for each in next(iter(memory.values()))]
    print(f"\n{world} ranks: {max(own) / MIB:.0f} MiB of weights on each, {largest / MIB:.0f} in the largest tensor")
    for way, ranks in memory.items():
        peaks = ", ".join(f"{each['peak'] / MIB:5.0f}" for each in ranks)
        print(f"{way:13} {middle.get(way, ranks[0]['seconds']):6.2f} s   peak MiB by rank: {peaks}")
    ratios = {"seconds: sharded / dcp": middle["sharded"] / middle["dcp"]}
    for way, name, weights, tensors in (
        ("sharded", "sharded / (1.05 shard + largest)", 1.05, 1), ("rank0", "rank0 / (shard + 2 largest)", 1, 2),
    ):  # fmt: skip
        if way in memory:
            ratios[name] = max(each["peak"] / (weights * each["own"] + tensors * largest) for each in memory[way])
    for name, ratio in ratios.items():
        print(f"{name:36} {ratio:6.3f}")
    return {
        "peak_bytes": {way: [each["peak"] for each in ranks] for way, ranks in memory.items()},
        "bytes_of_weights": own,
        "seconds": {**{way: ranks[0]["seconds"] for way, ranks in memory.items()}, **middle},
        "ratios": ratios,
        "all": rows,
    }


if __name__ == "__main__":
    main()
