"""With `run.exact`, many kinds of run have the same bits on one rank and on two, three, five or eight."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.names import ATTEMPT_STARTED, COMPILED, SAVED
from tests.config_text import dump_config
from tests.distributed.test_launch import end, start
from tests.distributed.test_same_bits import LLAMA, OPTIM, bits, train
from tests.models import architecture, save_checkpoint
from tests.runs import GPT2, make_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FULL: dict[str, tuple[int, str, Mapping[str, Any], dict[str, Any]]] = {
    "qwen3": (2, "bf16", architecture("qwen3"), {}),
    "gemma 3": (3, "bf16", architecture("gemma3_text"), {}),
    "gemma 2": (5, "fp32", architecture("gemma2"), {}),
    "mistral": (3, "fp16", architecture("mistral"), {}),
    "phi": (2, "bf16", architecture("phi"), {}),
    "olmo 2": (5, "bf16", architecture("olmo2"), {}),
    "opt": (3, "fp32", architecture("opt", dropout=0.1), {}),
    "gpt-2 with dropout": (5, "bf16", {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}, {}),
    "gpt-oss": (3, "bf16", architecture("gpt_oss"), {"train": {"router_aux_loss_coef": 0.01}}),
    "qwen3 moe": (5, "bf16", architecture("qwen3_moe"), {"train": {"router_z_loss_coef": 0.01}}),
    "deepseek": (2, "fp32", architecture("deepseek_v3"), {}),
    "qwen3-next": (3, "fp32", architecture("qwen3_next"), {}),
    "falcon-h1": (2, "bf16", architecture("falcon_h1"), {}),
    "lfm2": (5, "bf16", architecture("lfm2"), {}),
    "granite 4": (3, "bf16", architecture("granitemoehybrid"), {}),
    "sgd": (3, "bf16", LLAMA, {"optim": {**OPTIM, "optimizer": {"type": "sgd", "nesterov": True}}}),
    "lion": (2, "bf16", LLAMA, {"optim": {**OPTIM, "lr": 1e-3, "optimizer": {"type": "lion"}}}),
    "adafactor": (5, "bf16", LLAMA, {"optim": {**OPTIM, "optimizer": {"type": "adafactor"}}}),
    "muon": (5, "bf16", architecture("qwen3"), {"optim": {**OPTIM, "optimizer": {"type": "muon"}}}),
    "groups": (3, "bf16", LLAMA, {"optim": {**OPTIM, "groups": [{"match": "norm", "lr_ratio": 2.0}]}}),
    "no limit of the norm": (2, "bf16", LLAMA, {"optim": {"lr": 3e-3, "max_grad_norm": None}}),
    "smoothing": (3, "bf16", LLAMA, {"train": {"label_smoothing": 0.1, "z_loss": 0.01}}),
    "noise": (5, "bf16", LLAMA, {"train": {"neftune_noise_alpha": 5.0}}),
    "selective": (3, "bf16", LLAMA, {"parallel": {"activation_checkpointing": "selective"}}),
    "every second": (
        2, "bf16", LLAMA, {"parallel": {"activation_checkpointing": "every_n", "recompute_every": 2}},
    ),
    "layers in pairs": (3, "bf16", LLAMA, {"parallel": {"wrap": 2}}),
    "kept on the host": (3, "bf16", LLAMA, {"parallel": {"activation_offload": True}}),
    "one micro-batch a rank": (3, "bf16", LLAMA, {"train": {"global_batch": 6}}),
    "seven a rank": (3, "bf16", LLAMA, {"train": {"global_batch": 42}}),
    "many ranks": (8, "bf16", LLAMA, {"train": {"global_batch": 22}}),
    "short end": (5, "bf16", LLAMA, {"train": {"max_steps": None, "epochs": 2.7}, "tracking": {"documents": True}}),
}  # fmt: skip
"""Ranks, precision, architecture and sections."""
ADAPTED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dora": (3, "llama", {"type": "lora", "rank": 4, "dora": True}),
    "pissa": (2, "llama", {"type": "lora", "rank": 4, "init": "pissa"}),
    "olora": (5, "qwen3", {"type": "lora", "rank": 4, "init": "olora"}),
    "ratio": (3, "gemma3_text", {"type": "lora", "rank": 4, "rank_stabilized": True, "lr_ratio": 4.0}),
    "saved": (2, "llama", {"type": "lora", "rank": 4, "modules_to_save": ["embed_tokens"]}),
    "int8": (3, "llama", {"type": "qlora", "rank": 4, "quantization": "int8"}),
    "nf4": (5, "qwen3", {"type": "qlora", "rank": 4, "dropout": 0.1}),
    "ia3": (3, "llama", {"type": "ia3"}),
    "experts": (2, "mixtral", {"type": "lora", "rank": 4, "routers": "trained"}),
}

if torch.__version__ < "2.12":  # its FSDP takes no weights that are bytes
    ADAPTED = {name: case for name, case in ADAPTED.items() if case[2]["type"] != "qlora"}


def full(directory: Path, name: str, world: int) -> FinetuneConfig:
    _, precision, network, more = FULL[name]
    parallel = {"precision": precision, **more.get("parallel", {})}
    return _config(directory, name, world, network, {**more, "parallel": parallel})


def adapted(directory: Path, name: str, world: int) -> FinetuneConfig:
    _, network, method = ADAPTED[name]
    base = directory / f"base-{network}"
    if not base.exists():
        save_checkpoint(base, network)
    model = {"path": str(base), "init": "pretrained", "architecture": None}
    return _config(directory, name, world, {}, {"model": model, "method": method, "parallel": {"precision": "bf16"}})


def _config(
    directory: Path, name: str, world: int, network: Mapping[str, Any], sections: dict[str, Any]
) -> FinetuneConfig:
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": 20, **sections.pop("train", {})}
    run = {"name": f"{name.replace(' ', '-')}-{world}", "exact": True}
    return make_config(directory, network, run=run, train=train, **sections)


@pytest.mark.parametrize(("make", "cases"), [(full, FULL), (adapted, ADAPTED)])
def test_one_rank_and_more(make: Any, cases: Mapping[str, tuple[Any, ...]], tmp_path: Path) -> None:
    different = []
    for name, (world, *_) in sorted(cases.items(), key=lambda case: case[1][0]):  # few changes of the number of ranks
        alone, several = make(tmp_path, name, 1), make(tmp_path, name, world)
        train([alone], 1)
        train([several], world)
        if bits(alone) != bits(several):
            different.append(name)
    assert not different


@pytest.mark.parametrize("method", ["full", "lora"])
def test_compiled_layers(tmp_path: Path, method: str) -> None:
    """Each process has one graph, whichever documents it meets first: one rank, three, and one that becomes two.

    The last micro-batch is short.
    """
    model = {}
    if method == "lora":
        save_checkpoint(tmp_path / "base", "llama")
        model = {"model": {"path": str(tmp_path / "base"), "init": "pretrained", "architecture": None}}
    methods = {"full": {"type": "full"}, "lora": {"type": "lora", "rank": 4, "dropout": 0.1}}

    def config_of(name: str, *, compiled: bool = True) -> FinetuneConfig:
        return make_config(
            tmp_path, LLAMA, run={"name": name, "exact": True, "threads": 1}, method=methods[method], **model,
            parallel={"precision": "bf16", "compile": compiled},
            train={"global_batch": 12, "micro_batch": 3, "max_steps": None, "epochs": 2.65},
        )  # fmt: skip

    alone, three, resized = config_of("alone"), config_of("three"), config_of("resized")
    eager = config_of("eager", compiled=False)
    for config, world, stop in (
        (alone, 1, None),
        (three, 3, None),
        (resized, 1, 7),
        (resized, 2, None),
        (eager, 1, None),
    ):
        train([config], world, stop)
    plan = json.loads((Path(alone.run.storage) / "alone" / "plan.json").read_text())
    assert plan["total_samples"] % 3 != 0 and plan["steps"] > 12
    assert bits(three) == bits(resized) == bits(alone)
    assert bits(alone)[0] != bits(eager)[0], "the compiler rounds otherwise"
    for config, attempts in ((alone, 1), (three, 1), (resized, 2)):
        events = read_events(Path(config.run.storage) / config.run.name / "events.jsonl")
        found = [each["fields"]["graphs"] for each in events if each["event"] == COMPILED]
        assert found == [1] * attempts


def test_sums_that_are_passed_between_two_nodes_or_three(tmp_path: Path) -> None:
    """In thirteen micro-batches a step, for six ranks or eight: there are fillers, and nodes whose turn comes twice."""

    def config_of(name: str, reduce: str) -> FinetuneConfig:
        return make_config(
            tmp_path, LLAMA, run={"name": name, "exact": True}, parallel={"precision": "bf16", "reduce": reduce},
            train={"global_batch": 26, "micro_batch": 2, "max_steps": 20},
        )  # fmt: skip

    train([config_of("alone", "flat")], 1)
    for world, per_node in ((6, 2), (6, 3), (8, 4)):
        config = config_of(f"{world}-by-{per_node}", "hierarchical")
        train([config], world, fault=f"nothing, but nodes of {per_node}")
        assert bits(config) == bits(config_of("alone", "flat"))


def test_a_run_that_is_killed_at_ten_moments_and_resized_each_time(tmp_path: Path) -> None:
    """One, three, two and five ranks take turns; its bits and the digests of its checkpoints are those of one rank."""
    choose, steps = random.Random(18), 200
    sections: dict[str, Any] = {
        "parallel": {"precision": "bf16"}, "train": {"global_batch": 10, "micro_batch": 2, "max_steps": steps},
        "checkpoint": {"every": 5, "keep_last": 3},
    }  # fmt: skip
    killed, alone = (
        make_config(tmp_path, LLAMA, run={"name": name, "exact": True, "threads": 1}, **sections)
        for name in ("killed", "alone")
    )
    file, record = tmp_path / "config.yaml", tmp_path / "runs" / "killed" / "metrics.jsonl"
    file.write_text(dump_config(killed))
    kills = 0
    for world in itertools.cycle((1, 3, 2, 5)):
        command = ("-m", "raytune_fsdp.cli.main", "train", "--config", str(file), "--cluster.workers", str(world))
        process = start(sys.executable, *command)
        there, until = lines_of(record), choose.randrange(2, 18)
        while kills < 10 and process.poll() is None and lines_of(record) < there + until:
            time.sleep(0.01)
        if kills == 10 or process.poll() is not None:
            ended = end(process)
            assert ended.returncode == 0, ended.stderr
            break
        time.sleep(choose.random() / 5)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    train([alone], 1)
    events = [read_events(tmp_path / "runs" / name / "events.jsonl") for name in ("killed", "alone")]
    assert kills == 10 and {each["fields"]["world_size"] for each in events[0] if each["event"] == ATTEMPT_STARTED} == {
        1, 2, 3, 5
    }  # fmt: skip
    assert bits(killed) == bits(alone)
    saved = [
        {each["fields"]["step"]: each["fields"]["digest"] for each in those if each["event"] == SAVED}
        for those in events
    ]
    both = saved[0].keys() & saved[1].keys()  # a save is postponed while the one before is being written
    assert len(both) > 10 and all(saved[0][step] == saved[1][step] for step in both)


def lines_of(record: Path) -> int:
    return record.read_bytes().count(b"\n") if record.exists() else 0


def test_two_hundred_steps(tmp_path: Path) -> None:
    configs = [
        make_config(
            tmp_path, LLAMA, run={"name": f"long-{world}", "exact": True}, parallel={"precision": "bf16"},
            train={"global_batch": 10, "micro_batch": 2, "max_steps": 200},
        )
        for world in (1, 3)
    ]  # fmt: skip
    for config, world in zip(configs, (1, 3), strict=True):
        train([config], world)
    assert bits(configs[0]) == bits(configs[1])
