"""A hub model on machines with caches of their own, none of which is that of the process that prepares the run."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_trajectory
from tests.models import save_checkpoint
from tests.runs import make_config, trajectory
from tests.unit.fake_hub import TOKEN, FakeHub, fake_hub

ROOT = Path(__file__).parents[2]
MACHINES = ("a", "a", "b")
"""Of each rank: the first two have one cache."""
PREPARES = "head"
RUNS = ("adapter", "whole")
_WAIT_SECONDS = 6.0


def models(directory: Path) -> dict[str, Path]:
    """By the names on the hub."""
    base = save_checkpoint(directory / "base", "llama", max_shard_size="300KB", hidden_size=96, intermediate_size=384)
    network = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(r=32, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(network, lora).save_pretrained(directory / "adapter")
    make_config(directory)  # writes data and tokenizer
    return {f"someone/{name}": directory / name for name in ("base", "adapter", "tokenizer")}


def config_of(directory: Path, name: str, there: dict[str, str], run: str) -> FinetuneConfig:
    """One of two runs. `there`: the name or the place of each model."""
    model: dict[str, Any] = {
        "path": there["someone/base"], "tokenizer": there["someone/tokenizer"], "init": "pretrained",
        "architecture": None, "fill": "sharded" if name == "whole" else "auto",
    }  # fmt: skip
    method = {"type": "lora", "rank": 32, "alpha": 8, "target_modules": ["q_proj", "v_proj"], "dropout": 0.0}
    chosen = {"method": {**method, "adapter": there["someone/adapter"]}} if name == "adapter" else {}
    train = {"global_batch": 12, "micro_batch": 2, "max_steps": 3}
    return make_config(directory, run={"name": f"{name}-{run}"}, model=model, train=train, **chosen)


def process(hub: FakeHub, directory: Path, machine: str, *words: str, **settings: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    ours = {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(directory / f"hf-{machine}"), "NO_PROXY": "127.0.0.1",
        "HF_HUB_USER_AGENT_ORIGIN": machine, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.test_hub", *words], env={**kept, **ours, **settings}, text=True,
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def prepare_runs(directory: Path) -> None:
    """What a driver does: of all that it finds out ranks get a copy."""
    from raytune_fsdp.run.prepare import prepare

    for name in RUNS:
        config = FinetuneConfig.model_validate_json((directory / f"{name}.json").read_text())
        (directory / f"{name}.pickle").write_bytes(pickle.dumps((config, *prepare(config, len(MACHINES)))))


def train_rank(directory: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from raytune_fsdp.base.beat import pulse
    from raytune_fsdp.launch.worker import join, work
    from raytune_fsdp.model.directory.files import known_weights
    from raytune_fsdp.run.fetching import _brought

    torch.set_num_threads(1)
    device = torch.device("cpu")
    join(device, alone=False)
    everyone = dist.group.WORLD
    assert everyone is not None
    slow = known_weights("someone/slow", None, field="model.path")
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=_WAIT_SECONDS), everyone)
    since, beats = time.monotonic(), pulse().beats
    config, *_ = pickle.loads((directory / "adapter.pickle").read_bytes())
    _brought(slow, config.model_copy(update={"model": config.model.model_copy(update={"fill": "rank0"})}), print)
    assert time.monotonic() - since > 1.3 * _WAIT_SECONDS, "it took longer than ranks may wait for each other"
    assert pulse().beats - beats > 3, "and beats on each of them"
    _set_pg_timeout(timedelta(minutes=30), everyone)
    for name in RUNS:
        config, prepared, standing = pickle.loads((directory / f"{name}.pickle").read_bytes())
        work(config, prepared, standing, device, lambda: None)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_cache_whose_ranks_read_gets_each_file_once(tmp_path: Path) -> None:
    local = models(tmp_path)
    sizes = {f"{name}/{file.name}": file.stat().st_size for name, place in local.items() for file in weights_in(place)}
    for name in RUNS:
        on_hub = config_of(tmp_path, name, {each: each for each in local}, "hub")
        (tmp_path / f"{name}.json").write_text(on_hub.model_dump_json())
    with fake_hub() as hub, socket.create_server(("127.0.0.1", 0)) as free:
        for name, place in local.items():
            hub.add(name, place)
        slow = hub.add("someone/slow", local["someone/base"])
        finish(process(hub, tmp_path, PREPARES, "prepare", str(tmp_path)))
        read = [each for each in hub.sent if each.file in sizes]
        assert {each.file for each in read} == set(sizes), "the headers of all files"
        assert sum(each.stop - each.start for each in read) < 8e6
        assert not any(each.whole for each in read), "and no weights"
        slow.seconds_per_piece = 2.0
        port = free.getsockname()[1]
        free.close()
        ranks = [
            process(
                hub, tmp_path, machine, "rank", str(tmp_path),
                RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )
            for rank, machine in enumerate(MACHINES)
        ]  # fmt: skip
        try:
            said = [finish(rank) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        wholes = Counter((each.to, each.file) for each in hub.sent if each.file in sizes and each.whole)
    base = [file for file in sizes if file.startswith("someone/base/")]
    adapter = [file for file in sizes if file.startswith("someone/adapter/")]
    # The adapter's run has its weights from rank 0; of the other run each machine reads the base.
    expected = {*(("a", file) for file in base + adapter), *(("b", file) for file in base)}
    assert wholes == dict.fromkeys(expected, 1)
    assert "fetching the weights of someone/base from the hub (0.00 GB)" in said[0]
    for name in RUNS:
        here = config_of(tmp_path, name, {each: str(place) for each, place in local.items()}, "here")
        assert rows(tmp_path, f"{name}-hub") == trajectory(here, len(MACHINES)), "as from a directory"
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
    assert not list(tmp_path.rglob(".shared-*"))


def weights_in(place: Path) -> list[Path]:
    return sorted(place.glob("*.safetensors"))


def finish(started: subprocess.Popen[str]) -> str:
    said, _ = started.communicate(timeout=400)
    assert started.returncode == 0, said
    assert TOKEN not in said
    return said


def rows(directory: Path, run: str) -> list[dict[str, Any]]:
    return read_trajectory(directory / "runs" / run / "metrics.jsonl")


if __name__ == "__main__":
    {"prepare": prepare_runs, "rank": train_rank}[sys.argv[1]](Path(sys.argv[2]))
