"""Points of well-known models, computed beforehand: what a page without a server can be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.advise.alternatives import METHODS
from raytune_fsdp.predict.devices import DEVICES, link_speed
from raytune_fsdp.predict.host import host_needs
from raytune_fsdp.predict.page.text import point_as_data
from raytune_fsdp.predict.prediction import Cluster, predict_from, traced
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import Trace

LENGTHS = (2048, 8192, 32768)
RECOMPUTE = ("none", "selective", "full")
ON = ("A100-40GB", "A100-80GB", "H100", "H200", "B200", "L40S", "RTX-4090", "MI300X")
PER_NODE = 8
NETWORK = "400Gbps"


@dataclass(frozen=True, slots=True)
class Shown:
    """A model, and on how many GPUs it is looked at for each method."""

    model: str
    gpus: Mapping[str, Sequence[int]]


MODELS = (
    Shown("meta-llama/Llama-3.1-8B", {"full": (2, 4, 8, 16), "lora": (1, 2, 4, 8), "qlora": (1, 2, 4)}),
    Shown("meta-llama/Llama-3.1-70B", {"full": (16, 32, 64), "lora": (4, 8, 16), "qlora": (1, 2, 4, 8)}),
    Shown("meta-llama/Llama-3.1-405B", {"full": (64, 128, 256), "lora": (16, 32, 64), "qlora": (4, 8, 16)}),
    Shown("Qwen/Qwen3-8B", {"full": (2, 4, 8, 16), "lora": (1, 2, 4, 8), "qlora": (1, 2, 4)}),
    Shown("Qwen/Qwen3-32B", {"full": (8, 16, 32, 64), "lora": (2, 4, 8), "qlora": (1, 2, 4)}),
    # No QLoRA for mixtures of experts: it quantizes layers, and leaves tensors of experts as they are.
    Shown("Qwen/Qwen3-30B-A3B", {"full": (8, 16, 32, 64), "lora": (1, 2, 4, 8)}),
    Shown("mistralai/Mixtral-8x7B-v0.1", {"full": (8, 16, 32, 64), "lora": (2, 4, 8)}),
    Shown("openai/gpt-oss-20b", {"full": (4, 8, 16, 32), "lora": (1, 2, 4, 8)}),
    Shown("openai/gpt-oss-120b", {"full": (32, 64, 128), "lora": (4, 8, 16)}),
    Shown("tiiuae/falcon-180B", {"full": (32, 64, 128), "lora": (8, 16, 32), "qlora": (2, 4, 8)}),
)

COMMON = (
    "gpus", "needed_bytes", "bytes_inside", "bytes_between", "memory.where",
    *(f"memory.peak.{kind}" for kind in ("weights", "gradients", "optimizer", "gathered", "activations")),
    "memory.assumed.context and libraries", "memory.assumed.holes of the allocator",
    *(f"host.{when}" for when in ("loading", "training", "saving", "exporting", "naive")), "storage.checkpoint",
)  # fmt: skip
"""Fields of a point that are the same on every device."""

OF_DEVICE = (
    "fits", "step_seconds", "step_seconds_between", "compute_seconds", "moving_seconds", "update_seconds", "bound",
    "tokens_per_second_per_gpu", "mfu",
)  # fmt: skip

_DIGITS = 5


def config_of(model: str, method: str, length: int, recompute: str, gpus: int) -> FinetuneConfig:
    """Return the config of a step with one sample on every GPU."""
    return FinetuneConfig.model_validate(
        {
            "run": {"name": "planned", "storage": "runs"},
            "model": {"path": model},
            "data": {"seq_len": length, "train": [{"path": "rows.jsonl"}]},
            "train": {"global_batch": gpus, "micro_batch": 1, "max_steps": 1},
            # Written down, full_shard is also what one GPU has: the same step whatever memory it has.
            "parallel": {"strategy": "full_shard", "activation_checkpointing": recompute},
            **({"method": METHODS[method]} if method in METHODS else {}),
        }
    )


def cluster_of(device: str) -> Cluster:
    return Cluster(device=DEVICES[device], per_node=PER_NODE, between=link_speed(NETWORK))


def compute(models: Sequence[Shown] = MODELS, processes: int = 1) -> dict[str, Any]:
    """Compute all points, by model and method; for each method, by length, recomputation and number of GPUs."""
    jobs = [(each.model, method, tuple(gpus)) for each in models for method, gpus in each.gpus.items()]
    if processes > 1:
        # A process each: the planner has a process group of its own.
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(_points, jobs))
    else:
        found = [_points(job) for job in jobs]
    grid: dict[str, Any] = {each.model: {} for each in models}
    for (model, method, gpus), points in zip(jobs, found, strict=True):
        grid[model][method] = {"gpus": gpus, "points": points}
    return grid


def _points(job: tuple[str, str, Sequence[int]]) -> list[Any]:
    model, method, sizes = job
    subject = ModelSpec.of(config_of(model, method, LENGTHS[0], "none", sizes[0]))
    return [
        [[_point(subject, config_of(model, method, length, how, gpus)) for gpus in sizes] for how in RECOMPUTE]
        for length in LENGTHS
    ]


def _point(subject: ModelSpec, config: FinetuneConfig) -> list[Any]:
    """Return what all devices have in common, and a row for each of them."""
    plan = resolve(config, config.train.global_batch)
    trace: Trace | None = None
    rows: list[list[Any]] = []
    for device in ON:
        if trace is None or plan.layout.world == 1:  # one rank alone looks at how much memory there is
            trace = traced(subject, config, plan, cluster_of(device))
        found = predict_from(trace, config, plan, cluster_of(device))
        each = point_as_data(found, host_needs(config, found), [], None)
        if not rows:
            rows.append([_short(value_at(each, name)) for name in COMMON])
        rows.append([_short(value_at(each, name)) for name in OF_DEVICE])
    return rows


def value_at(point: Mapping[str, Any], name: str) -> Any:
    """Return a value by its dotted name, as `memory.peak.weights`; 0 for a part that there is not."""
    value: Any = point
    for key in name.split("."):
        value = value.get(key, 0)
    return value


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
