"""How much memory a training step of an 8B needs on one card, on tensors that have none.

    python -m benchmarks.memory [--size 8b] [--seq-len 8192] [--out benchmarks/results/memory.json]
    python -m benchmarks.memory --lora --micro 2 --seq-len 4096 --modes none

A Llama 3.1 8B, full fine-tuning in bf16 over fp32 weights, one sample of one micro-batch a step, built, sharded and
computed as a run does it (blocks, units, loss without logits, attention by borders), under fake tensors: every
operation runs, none has data. torch's FSDPMemTracker adds up what is alive; the peak is given by part. Moments are
added as their bytes (8 a number in fp32, 2 in 8 bits with their scales), since they are there from the first step to
the last. What a GPU adds is not in it: the CUDA context, workspaces of cuBLAS, holes in the allocator's segments.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from benchmarks.gpu.train_step import SIZES, architecture_of
from benchmarks.gpu.training import config_of
from benchmarks.record import write_result
from raytune_fsdp.base.batch import Cursor, PackedSample
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.model.layers import set_training_forward
from raytune_fsdp.model.network import build_network
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.predict.trace.trace import allocate_without_data
from raytune_fsdp.step.parallel import for_one_rank, make_mesh, shard, sharding_units
from raytune_fsdp.step.precision import store_frozen

CPU = torch.device("cpu")
MODES = ("none", "selective", "full")
MOMENTS = {"fp32": 8.0, "8-bit": 2 + 2 * 4 / 256}
"""Bytes a number of both moments; in 8 bits each block of 256 has a scale."""


def sample(length: int, vocabulary: int) -> PackedSample:
    """Documents of 600 tokens."""
    ids = (np.arange(length) % vocabulary).astype(np.int32)
    positions = (np.arange(length) % 600).astype(np.int32)
    labels = np.where(positions == 0, -100, ids).astype(np.int32)
    return PackedSample(input_ids=ids, labels=labels, position_ids=positions, source_ids=np.zeros_like(ids), id=0)


def peak_of(size: str, seq_len: int, mode: str, *, micro: int = 1, lora: bool = False) -> dict[str, float]:
    """GiB at the peak of forward and backward, by part, without moments. Needs a process group."""
    method = {"type": "lora", "rank": 16, "alpha": 32} if lora else None
    config = config_of(
        Path("nowhere"), size=size, micro=micro, steps=1, compiled=False, recompute=mode, seq_len=seq_len, method=method
    )  # fmt: skip
    sizes = {**architecture_of(size), "max_position_embeddings": seq_len, "tie_word_embeddings": False}
    hf_config = LlamaConfig(**sizes)
    block = to_batch([sample(seq_len, hf_config.vocab_size)] * micro, index=0, after=Cursor())
    layout = Layout(world=1, data_ranks=1, replicas=1, shard_size=1)
    mesh = make_mesh(layout, CPU)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_network(hf_config, config)
    model.set_attn_implementation("documents_cpu")
    install_chunked_loss(model)
    store_frozen(model, "bf16")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parallel = for_one_rank(config.parallel, layout, model, 80 << 30, state=8)
    set_training_forward(model, recompute=mode)
    shard(model, mesh, parallel, sharding_units(model, parallel, ends=True))
    allocate_without_data(model, fake)
    model.train()
    with fake:
        tracker = FSDPMemTracker(model)
        with tracker:
            micro_batch_loss(model, block).total.backward()
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    parts = {str(kind).rpartition(".")[2].lower(): size / 2**30 for kind, size in peak.items() if size}
    # Weights that FSDP leaves alone are known to it by their views, as activations, and an embedding has none.
    embedding = model.get_input_embeddings().weight
    if not isinstance(embedding, DTensor):
        parts["embedding"] = embedding.nbytes / 2**30
        parts["total"] += parts["embedding"]
    return {"numbers": trained / 1e9, **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--micro", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with_process_group()
    found = {}
    for mode in arguments.modes:
        found[mode] = parts = peak_of(
            arguments.size, arguments.seq_len, mode, micro=arguments.micro, lora=arguments.lora
        )
        shown = ", ".join(f"{name} {size:.2f}" for name, size in parts.items() if name not in ("numbers", "total"))
        print(f"{mode:10} {shown}")
        for name, width in MOMENTS.items():
            parts[f"total with {name} moments"] = total = parts["total"] + width * parts["numbers"] * 1e9 / 2**30
            print(f"{'':10} {total:.1f} GiB with {name} moments")
    dist.destroy_process_group()
    if arguments.out:
        what = "GiB at the peak of a step on one card, by part, under fake tensors; trained numbers in billions"
        settings = {key: vars(arguments)[key] for key in ("size", "seq_len", "micro", "lora")}
        write_result(arguments.out, {"what": what, **settings, "modes": found})


def with_process_group() -> None:
    """One rank that talks to nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())


if __name__ == "__main__":
    main()
