"""What every rank says of itself is in the metrics, and a rank that runs out of memory says what took it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from raytune_fsdp.record.jsonl import read_events, read_metrics
from tests.ranks import run_ranks
from tests.runs import GPT2, LLAMA, make_config, train_rank


def out_of_memory(values: Mapping[str, Any]) -> str:
    """Train until the third step has no memory, on a node that has little for saves; what is said."""
    import torch

    from raytune_fsdp.base.errors import TrainingError
    from raytune_fsdp.checkpoint import room
    from raytune_fsdp.run import loop

    step = loop.train_step
    room.free_memory = lambda: 1000

    def third(*args: Any, **kwargs: Any) -> Any:
        if args[3].step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(*args, **kwargs)

    loop.train_step = third
    try:
        train_rank(values)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it went on")


def test_ranks_say_how_long_they_took_and_what_took_their_memory(tmp_path: Path) -> None:
    config = make_config(tmp_path, profile={"steps": [2]}, train={"global_batch": 4, "micro_batch": 2, "max_steps": 4})
    said = run_ranks(out_of_memory, 2, config.model_dump())
    assert [words.split(":")[0] for words in said] == [f"rank {rank} ran out of memory on cpu" for rank in (0, 1)]
    assert all("Cheapest change: " in words for words in said)
    directory = tmp_path / "runs" / "run"
    lines = list(read_metrics(directory / "metrics.jsonl"))
    assert len(lines) == 2
    for line in lines:
        for key in ("rank_seconds", "rank_data_seconds"):
            assert line[key] == sorted(line[key]) and len(line[key]) == 3
        least, median, most = line["rank_memory_bytes"]
        assert 1e8 < least <= median <= most < 1e10 and least <= line["memory_bytes"] <= most
        assert line["reserved_bytes"] is None, "a CPU has no allocator of ours"
        assert line["host_memory_bytes"] > 0
    ((node, held, left, *_),) = lines[0]["nodes"]
    assert node and held > 2e8 and left > 0, "both ranks are on it"
    events = {event["event"]: event["fields"] for event in read_events(directory / "events.jsonl")}
    # Weights and two moments in fp64: the node has both ranks.
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))
    cramped, bytes_of_both = events["memory_short"], 3 * 8 * network.num_parameters()
    assert cramped["free"] == 1000 and bytes_of_both <= cramped["wanted"] <= 1.01 * bytes_of_both
    assert events["profiled"] == {"step": 2, "path": str(directory / "profile" / "step-2-rank-0.txt")}
    assert (directory / "profile" / "step-2-rank-1.json.gz").stat().st_size > 0


WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 256}

SLOW_DOWN = """
import os, signal, sys, time
rank, times = int(sys.argv[1]), float(sys.argv[2])
while os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.005 * (times - 1))
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.005)
"""


def slowed(values: Mapping[str, Any], slow: int, what: str, times: float) -> None:
    """Train; rank `slow` computes for 5 ms and is stopped for as long as makes it so many times slower, or it waits
    for its data, or for its storage."""
    import torch.distributed as dist

    from raytune_fsdp.checkpoint import save_in_flight
    from raytune_fsdp.run import assemble

    is_slow = dist.get_rank() == slow
    if is_slow and what == "compute":
        subprocess.Popen([sys.executable, "-c", SLOW_DOWN, str(os.getpid()), str(times)])
    if is_slow and what == "data":
        take = assemble.to_device
        assemble.to_device = lambda batches, device: take((time.sleep(0.3) or each for each in batches), device)
    if is_slow and what == "storage":
        write = save_in_flight.write_pieces
        save_in_flight.write_pieces = lambda *given, **more: time.sleep(0.5) or write(*given, **more)
    train_rank(values)


@pytest.mark.slow  # where tests share two cores, every rank is stopped now and then
@pytest.mark.parametrize(
    ("world", "what", "times"),
    [
        (2, "compute", 8),
        (3, "data", 0),
        (3, "storage", 0),
        (2, "compute", 3),
        (4, "compute", 3),
    ],
)
def test_a_rank_that_the_others_wait_for_is_named(tmp_path: Path, world: int, what: str, times: float) -> None:
    saves = {"every": 1, "asynchronous": False} if what == "storage" else {}
    shape, length = (WIDE, 256) if what == "compute" else (GPT2, 48)
    config = make_config(
        tmp_path, shape, checkpoint=saves, data={"seq_len": length},
        train={"global_batch": 2 * world, "micro_batch": 2, "max_steps": 20, "log_every": 2},
    )  # fmt: skip
    run_ranks(slowed, world, config.model_dump(), 1, what, times)
    directory = tmp_path / "runs" / "run"
    named = [event["fields"] for event in read_events(directory / "events.jsonl") if event["event"] == "slow_rank"]
    assert [(fields["rank"], fields["spends_it_on"]) for fields in named] == [(1, what)], named
    assert named[0]["step"] <= 20 and named[0]["seconds"] > 1.5 * named[0]["others"]
    assert named[0]["node"] == socket.gethostname()


def no_memory_for(values: Mapping[str, Any], what: str) -> str:
    """What is said if a part of the run finds no memory when it is made."""
    import torch

    from raytune_fsdp.base.errors import TrainingError
    from raytune_fsdp.run import assemble

    def without_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    setattr(assemble, what, without_memory)
    try:
        train_rank(values)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it went on")


@pytest.mark.parametrize(
    ("what", "strategy", "way_out"),
    [
        ("fill", "full_shard", "more ranks (cluster.workers), which share weights, gradients and moments"),
        ("optimizer_of", "replicate", "parallel.strategy=full_shard"),
    ],
)
def test_too_large_to_be_built(tmp_path: Path, what: str, strategy: str, way_out: str) -> None:
    config = make_config(tmp_path, parallel={"strategy": strategy})
    (said,) = run_ranks(no_memory_for, 1, config.model_dump(), what)
    assert said == (
        "rank 0 ran out of memory on cpu while it made weights and moments, before the first step: "
        f"CUDA out of memory. Tried to allocate 2.00 GiB. Cheapest change: {way_out}"
    )
