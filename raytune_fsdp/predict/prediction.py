"""Predict what a config needs on a cluster, and how fast it will be there: one call for everybody who asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytune_fsdp.base.errors import ModelError, RaytuneError, in_one_line
from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.network import MASTER_DTYPE
from raytune_fsdp.plan.plan import Plan, resolve
from raytune_fsdp.predict.devices import GIB, Device
from raytune_fsdp.predict.links import network_of
from raytune_fsdp.predict.memory import Memory, memory_of
from raytune_fsdp.predict.speed import LINKS_BETWEEN, MIDDLE, Seconds, forwards_of, rates_of, seconds_of
from raytune_fsdp.predict.subject import ModelSpec, with_torch_alone
from raytune_fsdp.predict.trace.trace import Trace, trace
from raytune_fsdp.run.reference.during import is_within
from raytune_fsdp.step.flops import training_flops
from raytune_fsdp.step.precision import compute_dtype
from raytune_fsdp.step.traffic import Traffic

CONTEXT = int(1.0 * GIB)
"""Memory of a device that CUDA, its libraries and NCCL's buffers take besides tensors. An assumption; not measured
here."""

PROCESS = int(0.9 * GIB)
"""Memory of a rank that has imported torch and transformers and holds no weights: about 930 MB in Hugging Face's
article on fine-tuning Llama 2 70B, whose ranks above 0 hold nothing else. (1,506 MB with its share of a 7B's
buffers.)"""

HOLES = 0.03
"""Allocator fragmentation, as a share of what comes and goes in a step. An assumption; with expandable segments, which
runs have, holes are small."""


CALIBRATED_WITHIN = 0.25
"""How far the predicted time of a step is off at most, relative to its measured time, on a measured machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices on which a config is to run."""

    device: Device
    per_node: int = 8
    between: float | None = None
    """Bytes a second from machine to machine. None: nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a rank needs, moves, and takes for a step."""

    world: int
    plan: Plan
    cluster: Cluster
    memory: Memory
    assumed: Mapping[str, int]
    """Bytes of the device that no tensor has."""
    seconds: Seconds
    traffic: Traffic | None
    flops: float
    """Operations of a step, as MFU counts them."""
    parameters: ParameterCount
    active: int
    """Weights that a token is multiplied with, or looked up in: with experts, fewer than all."""
    attention: str
    checkpoint: int
    """Bytes of a checkpoint."""
    largest: int
    """Bytes of the largest weight."""
    tokens: int
    """Tokens of a step."""

    rates: str
    """What the device's speed is based on."""
    reached: float
    """How much of that speed real steps reach."""

    @property
    def interval(self) -> tuple[float, float]:
        """The range in which the seconds of a step are expected.

        It is what half of the published runs reach of the roofline, on links that are better or worse than planned.
        Where the machine was measured, all cases of benchmarks/planned_time.py are in the range.
        """
        seconds = self.seconds
        if self.cluster.device.measured is not None:
            return seconds.step / (1 + CALIBRATED_WITHIN), seconds.step / (1 - CALIBRATED_WITHIN)
        low, high = (seconds.at(reached, links) for reached, links in zip(MIDDLE, LINKS_BETWEEN, strict=True))
        return low, high

    @property
    def needed(self) -> int:
        return self.memory.total + sum(self.assumed.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.cluster.device.memory

    @property
    def mfu(self) -> float:
        return self.flops / (self.seconds.step * self.world * self.cluster.device.peak)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second per device."""
        return self.tokens / self.seconds.step / self.world

    @property
    def hours(self) -> float:
        """Hours of the whole run."""
        return self.seconds.step * self.plan.steps / 3600


def predict(subject: ModelSpec, config: FinetuneConfig, plan: Plan | int, cluster: Cluster) -> Prediction:
    """Predict what a config needs. `plan` is the run's, or a number of GPUs where no more than a step is asked for."""
    if isinstance(plan, int):
        # A length in epochs is not known without the data, and no step depends on it.
        plan = resolve(config.with_sections(train={"max_steps": config.train.max_steps or 1, "epochs": None}), plan)
    return predict_from(traced(subject, config, plan, cluster), config, plan, cluster)


def traced(subject: ModelSpec, config: FinetuneConfig, plan: Plan, cluster: Cluster) -> Trace:
    """Trace a step on the devices of a cluster.

    One rank alone looks at their memory; of several, the trace is the same on all devices of a kind, as many on each
    machine.
    """
    config, device = with_torch_alone(config), cluster.device
    try:
        return trace(
            config, subject.hf_config, subject.needs, plan,
            memory=int(device.memory), device=device.kind, added=subject.added, gloo=device.kind == "cpu",
            per_node=cluster.per_node,
        )  # fmt: skip
    except RaytuneError:
        raise
    except Exception as error:  # of a network that operations on tensors without data do not suit
        raise ModelError(
            f"model: a step of this network cannot be planned without its data ({in_one_line(error)}): "
            "`raytune-fsdp train --dry-run` measures one on the machines themselves"
        ) from error


def predict_from(found: Trace, config: FinetuneConfig, plan: Plan, cluster: Cluster) -> Prediction:
    """Return what a traced step takes on these devices."""
    device, world, memory = cluster.device, plan.layout.world, memory_of(found)
    precision, counts = config.parallel.precision, found.counts
    rates = rates_of(
        device, compiled=config.parallel.compile in (True, "auto"), tf32=config.parallel.tf32,
        itemsize=compute_dtype(precision).itemsize, narrow=precision == "fp8",
    )  # fmt: skip
    seconds = seconds_of(
        found, rates, network_of(device, cluster.per_node, cluster.between), plan, memory,
        further=forwards_of(config),
    )  # fmt: skip
    tokens = plan.division.global_batch * config.data.seq_len  # of full samples, each of one document
    offloaded = memory.sent // max(1, len(found.stands_for))
    changing = memory.total - memory.kept
    # Bytes of the device that no tensor of the trace has.
    if device.kind == "cpu":
        assumed = {"process and libraries": PROCESS}
    else:
        assumed = {
            "context and libraries": CONTEXT,
            "holes of the allocator": int(HOLES * changing),
            # For the layer that computes, and for the next one, whose copies are on their way
            # (model/offload_activations.py).
            **({"back from the host": 2 * offloaded} if offloaded else {}),
        }
    if config.reference.when == "during" and not is_within(config):
        assumed["a copy of the weights, as the reference"] = memory.start.get("weights", 0)
    return Prediction(
        world=world,
        plan=plan,
        cluster=cluster,
        memory=memory,
        assumed=assumed,
        seconds=seconds,
        traffic=found.traffic,
        flops=training_flops(
            counts.architecture,
            tokens=tokens,
            targets=tokens,
            attended_pairs=tokens * (config.data.seq_len + 1) // 2,
        ),
        parameters=counts.parameters,
        active=counts.parameters.total - counts.asleep,
        largest=counts.largest,
        rates=rates.basis,
        reached=rates.reached,
        checkpoint=_checkpoint(found, memory.start.get("optimizer", 0), config),
        attention=found.attention,
        tokens=tokens,
    )


def _checkpoint(found: Trace, state: int, config: FinetuneConfig) -> int:
    """Return the bytes of a checkpoint: for each trained number of the network, as many as rank 0 has for each of its
    own. Not rank 0's times the number of ranks: of a few rows, or where ranks share layers, it has another part."""
    numbers = found.trained_bytes / MASTER_DTYPE[config.parallel.precision].itemsize
    return round(found.counts.parameters.trainable * (found.trained_bytes + state) / numbers) if numbers else 0
