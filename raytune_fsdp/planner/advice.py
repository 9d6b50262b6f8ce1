"""What may not be meant, or could be better: each with an id, a threshold and a source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.planner.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    id: str
    text: str
    source: str


_HIGH = 1e-4
_HIGH_FOR_LARGE = 2e-5
_LARGE = 100_000_000_000
_EPOCHS = 4.0
_TIGHT = 0.95


def advice(config: FinetuneConfig, found: Prediction) -> list[Advice]:
    return [*_of_learning(config, found), *_of_hardware(config, found)]


def _of_learning(config: FinetuneConfig, found: Prediction) -> Iterator[Advice]:
    lr, method = config.optim.lr, config.method.type
    large = found.parameters.total >= _LARGE
    most = _HIGH_FOR_LARGE if large else _HIGH
    if method == "full" and lr > most:
        yield Advice(
            id="lr-high",
            text=f"optim.lr={lr:g} is more than {most:g} for all weights of a model of "
            f"{found.parameters.total / 1e9:.0f} billion; {found.tokens:,} tokens a step do not call for it",
            source="Llama 2 was fine-tuned with 2e-5 and 64 samples a step (arXiv 2307.09288, 3.1); larger models want "
            "lower rates (GPT-3, arXiv 2005.14165, table 2.1)",
        )
    if method in ("lora", "qlora") and lr < 2e-5:
        yield Advice(
            id="lr-low",
            text=f"optim.lr={lr:g} is low for adapters: they take about ten times the rate of full weights",
            source="QLoRA used 1e-4 to 2e-4 (arXiv 2305.14314, table 9)",
        )
    if config.train.epochs is not None and config.train.epochs > _EPOCHS:
        yield Advice(
            id="epochs",
            text=f"train.epochs={config.train.epochs:g} is more than {_EPOCHS:g}: more repetitions add little",
            source="arXiv 2305.16264: up to four epochs are about as good as new data",
        )


def _of_hardware(config: FinetuneConfig, found: Prediction) -> Iterator[Advice]:
    cluster, layout, device = found.cluster, found.plan.layout, found.cluster.device
    if not device.bf16 and config.parallel.precision.startswith("bf16"):
        yield Advice(
            id="no-bf16",
            text=f"parallel.precision={config.parallel.precision}: {device.name} has no bf16; set fp16",
            source="NVIDIA: bf16 from compute capability 8.0 on",
        )
    if found.seconds.bound == "communication":
        several = found.world > cluster.per_node
        way = "more samples at a time (train.micro_batch), or fewer reductions (parallel.defer_gradient_sync)"
        if several and config.parallel.strategy == "full_shard":
            way += f"; parallel.strategy=hybrid_shard with shard_size={cluster.per_node}, if it fits"
        yield Advice(
            id="communication-bound",
            text=f"a step moves for {found.seconds.moving:.2f} s and computes for {found.seconds.compute:.2f} s: {way}",
            source="this plan",
        )
    if found.world > cluster.per_node and cluster.between is None:
        yield Advice(
            id="network",
            text="the speed between machines is not known (--network 400Gbps): taken to be like that inside of one",
            source="this plan",
        )
    if config.parallel.cpu_offload and found.fits and layout.world > 1:
        yield Advice(
            id="offload-last",
            text="parallel.cpu_offload moves all weights over PCIe in every step and updates them on the host, which "
            "the time of a step does not count: recomputing, smaller micro-batches and more ranks come first",
            source="ZeRO-Offload, arXiv 2101.06840: 30 to 40 TFLOP/s on a V100",
        )
    if found.fits and found.needed > _TIGHT * device.memory:
        yield Advice(
            id="tight",
            text=f"{found.needed / device.memory:.0%} of the memory is planned for: a longer document, another library "
            "or another driver may be too much",
            source=f"more than {_TIGHT:.0%}",
        )
    if found.plan.division.fillers:
        yield Advice(
            id="fillers",
            text=f"{found.plan.division.fillers} of {found.plan.division.blocks + found.plan.division.fillers} passes "
            "of a step only keep ranks aligned: choose a world size that divides the blocks",
            source="this plan",
        )
