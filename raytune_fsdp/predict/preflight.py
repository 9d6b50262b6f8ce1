"""Ask the planner and the storage whether a run will fit, before ranks are started.

The planner needs a process group of its own, so this runs in the process that starts ranks, before it joins any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError, RaytuneError, in_one_line
from raytune_fsdp.base.machine import free_space, nearest_existing
from raytune_fsdp.base.measured import NotPredicted, Predicted
from raytune_fsdp.base.urls import is_url, without_secrets
from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.cluster import Between
from raytune_fsdp.model.attention.choose import choose
from raytune_fsdp.model.split.sequence import check_attention_in_parts
from raytune_fsdp.plan.plan import Plan, resolve
from raytune_fsdp.predict.advise.changes import with_changes
from raytune_fsdp.predict.devices import GIB, Device, find_device
from raytune_fsdp.predict.host import kept_at_once
from raytune_fsdp.predict.memory import memory_of
from raytune_fsdp.predict.prediction import PROCESS, Cluster, predict_from
from raytune_fsdp.predict.subject import with_torch_alone
from raytune_fsdp.predict.trace.trace import trace
from raytune_fsdp.run.resume_point import RunInputs
from raytune_fsdp.step.precision import compute_dtype

logger = logging.getLogger(__name__)

TOO_MUCH = 1.1
"""A run is refused if its estimated peak is this many times what the device has; below that it is only warned of. What
no tensor has is assumed, and most documents are shorter than a sample."""

_LOOKING_SECONDS, _WARNING_SECONDS = 20.0, 5.0
"""For how long something that would fit is looked for: before a run is refused, and before one is started with a
warning."""

_TRACING_SECONDS = 20.0
"""How long a start waits for its prediction. A 70B takes 1 to 3 s; a state-space model computed token by token,
minutes."""

_ONE_TRACE_FOR_ALL = 1 << 50
"""Bytes of a device that is not known. Only one rank alone looks at them."""


def preflight(
    config: FinetuneConfig,
    prepared: RunInputs,
    plan: Plan,
    kind: str,
    name: str | None,
    *,
    memory: int | None,
    ranks: int = 1,
    per_node: int = 8,
    forced: bool,
    say: Callable[[str], None] = print,
) -> Predicted | NotPredicted:
    """Return what a rank of this plan needs; refuse what cannot fit.

    `name` is that of the devices, as far as it is known, and `memory` what one of them has, shared by this many
    `ranks`. `per_node`: the most ranks that one machine has.
    """
    check_attention(config, prepared, kind)
    device = device_named(name)
    found = predict_for_run(config, prepared, plan, kind, device, per_node)
    known = memory if memory is not None or device is None else int(device.memory)
    check_memory(config, prepared, plan, found, kind=kind, memory=known, ranks=ranks, forced=forced)
    check_room(config, prepared, plan, found, forced=forced, say=say)
    return found


def check_attention(config: FinetuneConfig, prepared: RunInputs, kind: str) -> None:
    """Refuse ranks that would share samples on devices of a `kind` without a kernel for it.

    No kernel is tried here: if one fails on a rank, that rank says so.
    """
    sequence = config.parallel.mesh.sequence
    if sequence > 1:
        attention = choose(
            config.model.attention, prepared.needs, kept=None, device=torch.device(kind),
            dtype=compute_dtype(config.parallel.precision), fails=lambda _: None,
        )  # fmt: skip
        check_attention_in_parts(sequence, attention)


def predict_for_run(
    config: FinetuneConfig,
    prepared: RunInputs,
    plan: Plan,
    kind: str,
    device: Device | None,
    per_node: int = 8,
    until: float | None = None,
) -> Predicted | NotPredicted:
    """Return what a rank needs on a `kind` of device, `cuda` or `cpu`, if that is found out before `until`.

    `until` is a time of time.monotonic(). Never raises: a run that was not predicted is trained all the same.
    """
    if kind == "cuda" and prepared.needs.softcap and config.model.attention.startswith("flash_attention"):
        # What torch has for it instead, eager attention, keeps all scores: a run would be refused for their gigabytes.
        return NotPredicted("flash-attn, which alone computes a soft cap without keeping all scores, cannot be traced")
    try:
        until = time.monotonic() + _TRACING_SECONDS if until is None else until
        found = trace(
            with_torch_alone(config),
            prepared.hf_config,
            prepared.needs,
            plan,
            memory=_ONE_TRACE_FOR_ALL if device is None else int(device.memory),
            device=kind,
            added=tuple(prepared.added),
            gloo=kind == "cpu",
            documents=1 if prepared.census is None else prepared.census.documents_of_sample,
            until=until,
        )
        memory, assumed, seconds = memory_of(found), PROCESS, None
        here = Cluster(device=device or find_device("H100"), per_node=per_node)
        judged = predict_from(found, config, plan, here)
        if kind == "cuda":
            assumed = sum(judged.assumed.values())
            # Between machines nobody knows how fast the network is.
            seconds = None if device is None or per_node < plan.layout.world else judged.seconds.step
    except Exception as error:  # of a network that operations on tensors without data do not suit
        logger.info("what the run needs was not predicted", exc_info=True)
        return NotPredicted(in_one_line(error))
    return Predicted(
        kept=memory.kept,
        peak=memory.total,
        where=memory.where,
        assumed=assumed,
        checkpoint=judged.checkpoint,
        seconds=seconds,
    )


def device_named(name: str | None) -> Device | None:
    """Return the device that torch or Ray calls `name`; None if it is not known, or not which of several."""
    try:
        return None if name is None else find_device(name)
    except ConfigError:
        return None


def check_memory(
    config: FinetuneConfig,
    prepared: RunInputs,
    plan: Plan,
    found: Predicted | NotPredicted,
    *,
    kind: str,
    memory: int | None,
    ranks: int = 1,
    forced: bool,
    look: bool = True,
) -> None:
    """Refuse a run that cannot fit a device of `memory` bytes, shared by this many `ranks`, and warn where it may not.

    `look`: also look for what would fit, which a rank cannot do.
    """
    if isinstance(found, NotPredicted) or memory is None:
        return
    said = _lacking(found, memory, ranks)
    if said is None:
        return
    warned = forced or not is_too_much(found, memory // ranks)
    if look and not forced:
        seconds = _WARNING_SECONDS if warned else _LOOKING_SECONDS
        remedy = _remedy(config, prepared, plan.layout.world, kind, memory, ranks, seconds)
    else:
        remedy = "`raytune-fsdp plan --gpu` with --alternatives lists what fits"
        workers = config.cluster.workers
        if kind == "cuda" and isinstance(workers, Between) and plan.layout.world < workers.max:
            remedy = f"More ranks may need less each: set cluster.workers.min above {plan.layout.world}; {remedy}"
    if warned:
        logger.warning("it may run out of memory: %s. %s", said, remedy)
        return
    raise ConfigError(f"the run does not fit: {said}. {remedy}; --force starts it all the same")


def is_too_much(found: Predicted, room: int) -> bool:
    """Return whether a rank is refused on a device with this much room, and not only warned of it."""
    return found.kept > room or found.needed > TOO_MUCH * room


def _lacking(found: Predicted, memory: int, ranks: int) -> str | None:
    """Return what a rank needs more than its share of a device has; None if it has enough."""
    room = memory // ranks
    if found.kept <= room and found.needed <= room:
        return None
    needs, has = apart(found.kept if found.kept > room else found.needed, room)
    shared = f"it has {has} of the {memory / GIB:.1f} GiB that {ranks} ranks share"
    has = shared if ranks > 1 else f"its device has {has}"
    if found.kept > room:
        return (
            f"a rank keeps {needs} of weights, buffers and the optimizer's state from step to step (counted, not "
            f"estimated), and {has}"
        )
    return f"a rank is estimated to need {needs} at the most ({found.where}), and {has}"


def apart(one: float, other: float) -> tuple[str, str]:
    """Write two numbers of bytes with as many digits as it takes to see that they differ."""
    for digits in (1, 2, 3):
        said = f"{one / GIB:.{digits}f} GiB", f"{other / GIB:.{digits}f} GiB"
        if said[0] != said[1]:
            return said
    return f"{one:,.0f} bytes", f"{other:,.0f} bytes"


def _remedy(
    config: FinetuneConfig, prepared: RunInputs, world: int, kind: str, memory: int, ranks: int, seconds: float
) -> str:
    """Return what would fit, as traced: changes on top of each other, the cheapest first; else other numbers of ranks.

    The method, and so what is learned, stays.
    """
    until, made, room = time.monotonic() + seconds, dict[str, Any](), memory // ranks
    parallel, train, wanted = config.parallel, config.train, list[Mapping[str, Any]]()
    if world > 1 and parallel.strategy != "full_shard":
        wanted.append({"parallel.strategy": "full_shard"})
    if parallel.activation_checkpointing in ("none", "every_n"):
        wanted.append({"parallel.activation_checkpointing": "selective"})
    if parallel.activation_checkpointing != "full":
        wanted.append({"parallel.activation_checkpointing": "full"})
    if train.micro_batch > 1:
        wanted.append({"train.micro_batch": 1})
    for changes in wanted:
        made |= changes
        if time.monotonic() < until and _fits(config, prepared, made, world, kind, room, until):
            return f"It fits with {_in_words(made)}"
    for more in (2, 4, 8, 16) if kind == "cuda" else ():  # on CPUs they would share the same memory
        if time.monotonic() < until and _fits(config, prepared, made, world * more, kind, room, until):
            alone = _fits(config, prepared, {}, world * more, kind, room, until)
            with_changes = "" if alone or not made else f" with {_in_words(made)}"
            return f"It fits on {world * more} ranks ({_more_workers(config, world * more)}){with_changes}"
    for fewer in sorted({max(1, ranks // 4), max(1, ranks // 2)} - {ranks}, reverse=True):  # who share the same memory
        if time.monotonic() < until and _fits(
            config, prepared, {}, max(1, world * fewer // ranks), kind, memory // fewer, until
        ):
            return f"It fits on fewer ranks, which share the same memory (cluster.workers={world * fewer // ranks})"
    more_of = "more ranks" if kind == "cuda" else "more machines"
    return (
        f"Nothing that was tried makes it fit: use {more_of}, larger ones, method.type=qlora, which keeps less, or a "
        "smaller model"
    )


def _more_workers(config: FinetuneConfig, ranks: int) -> str:
    workers = config.cluster.workers
    if not isinstance(workers, Between):
        return f"cluster.workers={ranks}"
    return f"cluster.workers.max={ranks}" if ranks > workers.max else "add nodes: the cluster has no room for them"


def _fits(
    config: FinetuneConfig,
    prepared: RunInputs,
    changes: Mapping[str, Any],
    world: int,
    kind: str,
    room: int,
    until: float,
) -> bool:
    try:
        changed = with_changes(config, changes)
        plan = resolve(changed, world, prepared.census)
    except (ValidationError, RaytuneError):  # what does not go together, or too many ranks for the batch
        return False
    found = predict_for_run(changed, prepared, plan, kind, None, until=until)
    return isinstance(found, Predicted) and found.needed <= room


def _in_words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def check_room(
    config: FinetuneConfig,
    prepared: RunInputs,
    plan: Plan,
    found: Predicted | NotPredicted,
    *,
    forced: bool,
    say: Callable[[str], None] = print,
) -> None:
    """Refuse a run for whose next checkpoint there is no room, and warn where there is none for all that it keeps.

    An older one is only removed once a newer one is complete, so none makes room for the next. Nobody says how much is
    left in an object store, or of a quota.
    """
    place, chosen = prepared.place, config.checkpoint
    if prepared.dry:
        return
    field = "checkpoint.storage" if chosen.storage else "run.storage"
    if is_url(place.checkpoints):
        where = without_secrets(place.checkpoints)
        say(f"{where}: an object store does not say how much room it has, so that is not checked")
        return
    if isinstance(found, NotPredicted):
        return
    directory = Path(place.checkpoints)
    try:
        there = nearest_existing(directory)
        free, more = free_space(there), more_at_once(config, plan, place.checkpoints)
    except OSError as error:
        say(f"{field}: how much room is left at {directory} is not known ({in_one_line(error)})")
        return
    size = found.checkpoint
    if free < size:
        left, takes = apart(free, size)
        said = f"{field}: {left} are free at {there}, and a checkpoint takes {takes}"
        if not forced:
            raise ConfigError(
                f"{said}: make room, or set {field} to a place that has it; --force starts the run all the same"
            )
        logger.warning("%s: saving will fail until there is room", said)
    elif free < more * size:
        left, take = apart(free, more * size)
        logger.warning(
            "%s: %s are free at %s, and %d more checkpoints come before one is removed, which take %s: make room, or "
            "lower checkpoint.keep_last",
            field, left, there, more, take,
        )  # fmt: skip


def more_at_once(config: FinetuneConfig, plan: Plan, checkpoints: str) -> int:
    """Return how many checkpoints are added to those that are there before one is removed."""
    return sum(kept_at_once(config.checkpoint, plan).values()) - len(committed(checkpoints))
