"""What every rank says of itself is in the metrics, and a rank that runs out of memory says what took it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytune_fsdp.tracking.jsonl import read_events, read_metrics
from tests.ranks import run_ranks
from tests.runs import make_config, train_rank


def out_of_memory(values: Mapping[str, Any]) -> str:
    """Train until the third step has no memory; what is said."""
    import torch

    from raytune_fsdp import loop
    from raytune_fsdp.errors import TrainingError

    step = loop.train_step

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
        assert line["host_memory_bytes"] > 0
    profiled = [event["fields"] for event in read_events(directory / "events.jsonl") if event["event"] == "profiled"]
    assert profiled == [{"step": 2, "path": str(directory / "profile" / "step-2-rank-0.txt")}]
    assert (directory / "profile" / "step-2-rank-1.json.gz").stat().st_size > 0
