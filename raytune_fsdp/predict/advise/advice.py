"""Warnings and suggestions about a config, each with an id, a threshold and a source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.cluster import SPOT_NOTICE_SECONDS
from raytune_fsdp.predict.advise.alternatives import Alternative, change_in_words
from raytune_fsdp.predict.devices import GIB
from raytune_fsdp.predict.prediction import Prediction
from raytune_fsdp.predict.speed import forwards_of
from raytune_fsdp.predict.stopping import Stopping
from raytune_fsdp.predict.teacher import TeacherPass


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    id: str
    text: str
    source: str


_HIGH_FOR_LARGE = 2e-5
_LARGE = 100_000_000_000
_EPOCHS = 4.0
_TIGHT = 0.95
_SLOW_GBPS = 100
_NOTICED = 0.5
_MANY = 64
_MANY_GBPS = 1000
_SLOW_STORAGE = 100e6
"""Bytes a second that any storage of checkpoints should write: below that `doctor` warns."""

_RATE, _RATE_TOKENS, _RATE_TIMES = 2e-5, 64 * 4096, 10
"""Llama 2's rate and tokens a step. A rate is called high at ten times what the square root of the batch makes of it:
the recipes of others are below that."""


def advice(
    config: FinetuneConfig,
    found: Prediction,
    faster: Sequence[Alternative] | None = None,
    stopping: Stopping | None = None,
    teacher: TeacherPass | None = None,
) -> list[Advice]:
    """Return warnings and suggestions about a config.

    `faster`: what was found to make a step wait less for its links; None: nobody has looked. `stopping`: how long saves
    take; None: that is not known. `teacher`: what its pass needs; None: there is no teacher.
    """
    return [
        *_of_learning(config, found),
        *_of_hardware(config, found),
        *_of_links(config, found, faster),
        *_of_notice(config, found, stopping),
        *_of_reference(config, found),
        *([] if teacher is None else _of_teacher(teacher, found)),
    ]


def _of_learning(config: FinetuneConfig, found: Prediction) -> Iterator[Advice]:
    lr, method = config.optim.lr, config.method.type
    large = found.parameters.total >= _LARGE
    most = _RATE_TIMES * _RATE * math.sqrt(found.tokens / _RATE_TOKENS)
    most = min(most, _HIGH_FOR_LARGE) if large else most
    if method == "full" and config.model.init == "pretrained" and lr > most:
        yield Advice(
            id="lr-high",
            text=f"optim.lr={lr:g} is more than {most:.1g}, which is high already for steps of {found.tokens:,} tokens "
            f"that train all weights of a model of {found.parameters.total / 1e9:.1f} billion",
            source=f"Llama 2 was fine-tuned with {_RATE:g} and steps of 64 x 4,096 tokens (arXiv 2307.09288, 3.1); "
            f"rates go with the square root of the batch (arXiv 2205.10287); {_RATE_TIMES} times that"
            + (f"; {_HIGH_FOR_LARGE:g} from 100 billion weights on (arXiv 2005.14165, table 2.1)" if large else ""),
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
    device = found.cluster.device
    if not device.bf16 and config.parallel.precision.startswith("bf16"):
        yield Advice(
            id="no-bf16",
            text=f"parallel.precision={config.parallel.precision}: {device.name} has no bf16; set fp16",
            source="NVIDIA: bf16 from compute capability 8.0 on",
        )
    if config.parallel.precision == "fp8" and not device.fp8:
        yield Advice(
            id="no-fp8",
            text=f"parallel.precision=fp8: {device.name} has no fp8; set bf16",
            source="NVIDIA: fp8 from compute capability 8.9 on; AMD: from MI300 on",
        )
    if config.parallel.cpu_offload and found.fits:
        yield Advice(
            id="offload-last",
            text=f"parallel.cpu_offload moves weights and gradients over PCIe in every pass "
            f"({found.seconds.offloading:.2f} s a step) and updates on the host: recomputing, smaller micro-batches "
            "and more ranks come first",
            source="ZeRO-Offload, arXiv 2101.06840: 30 to 40 TFLOP/s on a V100",
        )
    if found.fits and found.needed > _TIGHT * device.memory:
        yield Advice(
            id="tight",
            text=f"{found.needed / device.memory:.0%} of the memory is planned for: a longer document, another library "
            "or another driver may be too much",
            source=f"more than {_TIGHT:.0%}",
        )
    division = found.plan.division
    if division.fillers:
        yield Advice(
            id="fillers",
            text=f"{division.fillers} of {division.micro_batches + division.fillers} passes of a step only keep ranks "
            "aligned: choose a world size that divides the micro-batches",
            source="this plan",
        )


def _of_notice(config: FinetuneConfig, found: Prediction, stopping: Stopping | None) -> Iterator[Advice]:
    cloud = config.cluster.spot_notice
    if cloud == "none":
        return
    notice = SPOT_NOTICE_SECONDS[cloud]
    needed = found.checkpoint / notice
    if needed <= (_SLOW_STORAGE if stopping is None else stopping.writing.speed):
        return
    takes = "how long a save takes is not known (--storage 1.2GB/s)"
    if stopping is not None:
        takes = f"a save takes {stopping.save:.0f} s at {stopping.writing.speed / 1e9:.2g} GB/s"
    yield Advice(
        id="notice",
        text=f"cluster.spot_notice={cloud}: the notice comes {notice:.0f} s before the end, and {takes}. Where storage "
        f"writes less than {needed / 1e9:.2g} GB/s, a machine that is taken away costs what the run has trained since "
        "its last checkpoint (checkpoint.every)",
        source=f"{found.checkpoint / 1e9:,.0f} GB in the cloud's notice",
    )


def _of_reference(config: FinetuneConfig, found: Prediction) -> Iterator[Advice]:
    objective, forward = config.train.objective, found.seconds.compute / (3 + forwards_of(config))
    source = "this plan; a forward pass is a third of what a step computes"
    if objective.compares and config.reference.when == "before":
        hours = forward * found.plan.steps / max(1.0, config.train.epochs or 1.0) / 3600
        yield Advice(
            id="reference",
            text=f"before its first step, the run asks the reference once about every row that it will read: "
            f"{hours:.1f} hours at most. What it says is kept beside the prepared data, for every run with the same "
            "rows and reference",
            source=source,
        )
    elif objective.compares:
        yield Advice(
            id="reference",
            text=f"reference.when=during: every step asks the reference, too, which takes about {forward:.2f} s more",
            source=source,
        )
    if objective.type == "kto":
        yield Advice(
            id="kl",
            text="train.objective.type=kto: every step goes over its batch once more for the divergence from the "
            f"reference, which takes about {forward:.2f} s more, and half of its tokens are mismatched answers for "
            "that",
            source=source,
        )


def _of_teacher(teacher: TeacherPass, found: Prediction) -> Iterator[Advice]:
    kept = (
        f"at most {teacher.bytes / 1e9:,.1f} GB are kept beside the prepared data ({teacher.token_bytes:,} bytes for "
        "each token that is trained on), for every run with the same teacher"
    )
    if teacher.memory is None or teacher.seconds is None:
        yield Advice(
            id="teacher", text=f"teacher.model={teacher.model}: its sizes are not known ({teacher.because}); {kept}",
            source="this plan",
        )  # fmt: skip
        return
    device = found.cluster.device
    fits = "" if teacher.fits else ", which DOES NOT FIT: more GPUs, or a smaller teacher"
    yield Advice(
        id="teacher",
        text=f"before its first step, the run asks teacher.model={teacher.model} once about each token that it trains "
        f"on: about {teacher.memory / GIB:,.1f} of the {device.memory / GIB:,.1f} GiB of one {device.name}{fits}, "
        f"{teacher.seconds / 3600:.1f} hours at most; {kept}",
        source="a step of the teacher, of which a forward pass is a third",
    )


def _of_links(config: FinetuneConfig, found: Prediction, faster: Sequence[Alternative] | None) -> Iterator[Advice]:
    cluster, seconds = found.cluster, found.seconds
    several = found.world > cluster.per_node
    if seconds.bound == "communication":
        ways = "larger micro-batches (train.micro_batch) and fewer reductions (parallel.defer_gradient_sync) move less"
        if config.run.exact:
            ways = "larger micro-batches (train.micro_batch), which are another run with run.exact, move less"
        if faster:
            ways = "; ".join(
                f"{change_in_words(each.changes)}: {each.prediction.seconds.step:.2f} s" for each in faster
            )
        elif faster is not None:
            ways = (
                "nothing that learns the same and fits is faster on these GPUs. A larger train.global_batch, with a "
                "larger train.micro_batch, computes more for what it moves, and is another run"
            )
        yield Advice(
            id="communication-bound",
            text=f"a step moves for {seconds.moving:.2f} s and computes for {seconds.compute:.2f} s: {ways}",
            source="this plan, moving more than computing",
        )
    if several and cluster.between is None:
        yield Advice(
            id="network",
            text="the speed between machines is not known (--network 400Gbps): taken to be like that inside of one",
            source="this plan",
        )
    speed = None if cluster.between is None else 8 * cluster.between / 1e9
    passed_on = "with parallel.reduce=hierarchical sums are passed from machine to machine, and the bits are the same"
    sharded_inside = (
        f"with shards inside of them (parallel.strategy=hybrid_shard, parallel.shard_size={cluster.per_node}) "
        "gradients alone go between machines, once a step"
    )
    relayed = config.run.exact and config.parallel.reduce == "hierarchical"
    may_move_less = config.parallel.strategy == "full_shard" and not relayed
    if several and speed is not None and speed <= _SLOW_GBPS and may_move_less:
        yield Advice(
            id="no-infiniband",
            text=f"{speed:g} Gbit/s between machines is less than InfiniBand or EFA give: "
            + (passed_on if config.run.exact else sharded_inside),
            source=f"at most {_SLOW_GBPS} Gbit/s; ZeRO++, arXiv 2306.10209, shards so for such clusters",
        )
    if speed is not None and found.world >= _MANY and speed < _MANY_GBPS:
        yield Advice(
            id="large-cluster",
            text=f"{found.world} GPUs on machines with {speed:g} Gbit/s: from {_MANY} on, {_MANY_GBPS:,} Gbit/s a "
            "machine keep communication from deciding",
            source=f"{_MANY} GPUs and {_MANY_GBPS:,} Gbit/s: a rule of thumb of surveys of distributed training",
        )
    link = cluster.device.link
    if found.world > 1 and link.startswith("PCIe") and seconds.moving > _NOTICED * seconds.compute:
        yield Advice(
            id="no-nvlink",
            text=f"{cluster.device.name} talk over {link}: what moves takes {seconds.moving / seconds.compute:.1f} "
            "times as long as what is computed. GPUs with NVLink are faster; adapters (method.type=lora) move less",
            source=f"more than {_NOTICED:g} times; the device's data sheet",
        )
