"""A plan as a page that is read, and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from raytune_fsdp.predict.advise.advice import Advice
from raytune_fsdp.predict.advise.alternatives import Alternative, as_flags, change_in_words, cheapest_fit
from raytune_fsdp.predict.devices import GIB
from raytune_fsdp.predict.host import HostNeeds, PeerNeeds
from raytune_fsdp.predict.planned import Planned, cost
from raytune_fsdp.predict.prediction import Prediction
from raytune_fsdp.predict.search import Suitable
from raytune_fsdp.predict.stopping import Stopping, notices

WIDTH = 100
_LABEL = 12
_CHANGES = 47
"""The width of the column of changes."""

_PARTS = {
    "weights": "stay between steps",
    "gradients": "of this rank's share",
    "optimizer": "stays between steps",
    "gathered": "of units in use, and on its way",
    "activations": "for backward, and in use",
}


def as_page(planned: Planned) -> str:
    found = planned.prediction
    lines = [*_memory(planned), "", *_speed(planned), "", *_host(planned)]
    lines += [""] if planned.advice else []
    for number, each in enumerate(planned.advice):
        lines += _row("note" if number == 0 else "", f"{each.text} [{each.id}; {each.source}]")
    if planned.alternatives:
        lines += ["", *_alternatives(planned)]
    traced = "memory: one step traced on tensors without data, exact but for what is assumed"
    device = found.cluster.device
    speed = (
        f"a roofline over the traced operations ({found.rates}), of which published runs reach about 70 % (54 scored: "
        "50 within 30 %, the median off by 11 %)"
    )
    if device.measured is not None:
        speed = f"the sum of the traced operations ({found.rates}), of which real steps there reach {found.reached:.0%}"
    total, active = found.parameters.total / 1e9, found.active / 1e9
    experts = f", {active:,.2f} for a token" if active < 0.9 * total else ""
    lines += [
        "",
        *_row(
            "basis",
            f"network: {planned.basis}, {total:,.2f} billion weights{experts}. {traced} ({device.name}: memory "
            f"{device.memory_basis}). Speed: {speed}. Full samples of one document each.",
        ),
    ]
    return "\n".join(lines)


def _memory(planned: Planned) -> list[str]:
    found = planned.prediction
    device = found.cluster.device
    card = f"{'an' if device.name[0] in 'AHLR' else 'a'} {device.name}"  # an A100, an H100, a B200
    verdict = "fits" if found.fits else "DOES NOT FIT"
    lines = _row(
        "memory",
        f"{_gib(found.needed)} of the {_gib(device.memory)} of {card}: {verdict}. The most: {found.memory.where}.",
    )
    memory = found.memory
    parts: dict[str, tuple[int, str]] = {
        name: (memory.peak.get(name, 0), why)  # type: ignore[call-overload]
        for name, why in _PARTS.items()
        if name not in memory.elsewhere
    }
    parts |= {name: (size, "assumed, not measured") for name, size in found.assumed.items()}
    for name, (size, why) in parts.items():
        if size:
            bar = "#" * max(1, min(16, round(16 * (size / device.memory))))
            lines.append(f"{'':{_LABEL}}{name:23}{_gib(size):>10}  {bar:16} {why}")
    if memory.on_host:
        lines += _row("", f"{_gib(memory.on_host)} more in the host's memory (activation_offload, cpu_offload)")
    if not found.fits:
        lines += _to_fit(planned)
    return [*lines, *_step_down(planned), *_row("micro-batch", _micro_batch(planned))]


def _to_fit(planned: Planned) -> list[str]:
    found, best, shared = planned.prediction, cheapest_fit(list(planned.alternatives)), planned.shared
    way = "none of the ways that were tried: more GPUs, or a smaller model"
    if best is not None:
        way = f"{change_in_words(best.changes)} ({as_flags(best.changes)})"
    much = _gib(found.needed - found.cluster.device.memory)
    lines = _row("to fit", f"{much} too much; the cheapest change: {way}")
    if shared is not None and shared is not best:
        what = "every layer" if "parallel.mesh.tensor" in shared.changes else "each sample"
        lines += _row("", f"or with ranks that share {what}: {as_flags(shared.changes)}")
    return lines


def _step_down(planned: Planned) -> list[str]:
    other, found = planned.step_down, planned.prediction
    if other is None:
        return _row("a step down", "none that learns the same; more GPUs or another method need less (--alternatives)")
    freed, longer = found.needed - other.prediction.needed, other.prediction.seconds.step / found.seconds.step - 1
    much = f"{_gib(freed)}, and a step takes {abs(longer):.0%} {'longer' if longer >= 0 else 'less'}"
    return _row("a step down", f"{change_in_words(other.changes)} frees {much}")


def _micro_batch(planned: Planned) -> str:
    found, most, allowed = planned.prediction, planned.largest_micro_batch, planned.allowed_micro_batch
    tokens = found.tokens // found.plan.division.global_batch
    text = f"up to {most:,} samples of {tokens:,} tokens at a time fit" if most else "not one sample at a time fits"
    if most and allowed < most:
        text += f", of which a step of {found.plan.division.global_batch:,} has {allowed:,} for each GPU"
    if planned.paying_micro_batch is not None:
        text += f"; from {planned.paying_micro_batch} on a larger one no longer pays"
    return text


def _speed(planned: Planned) -> list[str]:
    found, seconds = planned.prediction, planned.prediction.seconds
    low, high = found.interval
    on_cpu = found.cluster.device.kind == "cpu"
    hidden = "by the same cores" if on_cpu else "hidden behind the other where it can"
    lines = _row(
        "speed",
        f"{_time(seconds.step)} a step ({_time(low)} to {_time(high)}), "
        f"{found.tokens_per_second:,.0f} tokens/s and GPU, MFU {found.mfu:.1%}: {seconds.bound}-bound",
    )
    lines += _row(
        "",
        f"computing {_time(seconds.compute)}, moving {_time(seconds.moving)} ({hidden}), "
        f"updating {_time(seconds.update)}"
        + (f", copying to the host and back {_time(seconds.offloading)}" if seconds.offloading else ""),
    )
    moved = f"{seconds.inside / 1e9:,.1f} GB a GPU inside of machines"
    if found.world > found.cluster.per_node:
        moved += f", {seconds.between / 1e9:,.1f} GB a machine between them"
    if seconds.exchanged:
        moved += f" ({seconds.exchanged / 1e9:,.1f} GB a GPU of it for attention)"
    if seconds.added:
        moved += f" ({seconds.added / 1e9:,.1f} GB a GPU of it to add up what parts of layers have computed)"
    lines += _row("moves", f"{moved}, each way, a step")
    long = f"{found.hours:,.1f} hours" if found.hours >= 1 else f"{60 * found.hours:.0f} minutes"
    text = f"{long} for {found.plan.steps:,} steps, {found.hours * found.world:,.1f} GPU-hours"
    price = cost(found, planned.price)
    lines += _row("the run", text + (f", {price:,.0f} at {planned.price:g} a GPU-hour" if price is not None else ""))
    samples = found.plan.division.global_batch
    return lines + _row("batch", f"{samples} samples, {found.tokens:,} tokens a step")


def _host(planned: Planned) -> list[str]:
    each = planned.host_needs
    kept = ", ".join(f"{count} {name}" for name, count in each.kept.items())
    free = "" if planned.free is None else f"; {_gib(planned.free)} are free at its place on this machine"
    clock = f", and up to {each.by_clock} more by the clock where there is room" if each.by_clock else ""
    return [
        *_row(
            "host memory",
            f"a machine: {_gib(each.loading)} while loading (every rank with a copy of its own: {_gib(each.naive)}), "
            f"{_gib(each.training)} while training, {_gib(each.saving)} while saving; {_gib(each.exporting)} to export",
        ),
        *(_row("peer copies", _copies(each.peers)) if each.peers.memory else []),
        *_row("storage", f"{_gib(each.checkpoint)} a checkpoint, {_gib(each.storage)} at a time ({kept}){clock}{free}"),
        *([] if planned.stopping is None else _row("a stop", _stopping(planned.stopping))),
    ]


def _copies(each: PeerNeeds) -> str:
    sent = f"with each copy it sends {_gib(each.sent)}" if each.others else "there is no other machine to send them to"
    return f"a machine: {_gib(each.memory)} of memory more, for two at a time; {sent}"


def _stopping(each: Stopping) -> str:
    by = "as this run has saved before" if each.writing.measured else "as given"
    within = " and ".join(
        f"{each.saved_within(seconds) / 1e9:,.3g} GB ({', '.join(clouds)}: {seconds:.0f} s)"
        for seconds, clouds in notices().items()
    )
    return (
        f"a save takes {_seconds(each.save)} at {each.writing.speed / 1e9:.3g} GB/s ({by}), and a stop up to "
        f"{_seconds(each.stop)}: the save that is being written, and the last. What stops the run has to wait for that "
        "(RAY_JOB_STOP_WAIT_TIME_S, a pod's grace, a scheduler's signal). A spot machine's notice is enough for "
        f"{within}"
    )


def _alternatives(planned: Planned) -> list[str]:
    same = [each for each in planned.alternatives if each.learns_the_same]
    other = [each for each in planned.alternatives if not each.learns_the_same]
    lines: list[str] = []
    price = "price" if planned.price is not None else ""
    for title, rows in (("These learn the same:", same), ("These learn something else:", other)):
        if rows:
            columns = f"{'memory':>10}{'tokens/s/GPU':>14}{'hours':>8}{'GPU-h':>9}{price:>9}".rstrip()
            lines += [*([""] if lines else []), f"{title:{_CHANGES + 2}}{columns}"]
            lines += [_alternative(each, planned.price) for each in rows[:12]]
    return lines


def _alternative(each: Alternative, price: float | None) -> str:
    found = each.prediction
    numbers = f"{found.tokens_per_second:>14,.0f}{found.hours:>8,.1f}{found.hours * found.world:>9,.0f}"
    whole = cost(found, price)
    numbers += "" if whole is None else f"{whole:>9,.0f}"
    text = change_in_words(each.changes) or "as it is"
    what = text if len(text) <= _CHANGES else f"{text[: _CHANGES - 1]}…"
    return f"  {what:{_CHANGES}}{_gib(found.needed):>10}{numbers if found.fits else '  does not fit'}".rstrip()


def _row(label: str, text: str) -> list[str]:
    return [f"{label if number == 0 else '':{_LABEL}}{line}" for number, line in enumerate(wrap(text, WIDTH - _LABEL))]


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= 0.05 * GIB else f"{size / 2**20:,.0f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _seconds(each: float) -> str:
    return f"{each:,.0f} s" if each >= 10 else f"{each:.1f} s"


def search_as_page(found: Sequence[Suitable], most_hours: float | None) -> str:
    """Return a table of clusters, the cheapest first."""
    within = f" within {most_hours:g} hours" if most_hours is not None else ""
    if not found:
        way = "more hours, other GPUs, or another method (method.type=lora)"
        return f"On none of these GPUs, up to 16 machines, does it fit and end{within}: {way}."
    lines = [f"{'GPUs':24}{'':20}{'memory':>10}{'tokens/s/GPU':>14}{'hours':>9}{'GPU-h':>10}{'price':>11}"]
    for each in found[:20]:
        on = each.prediction
        name = f"{on.world} x {on.cluster.device.name}"
        price = "" if each.price is None else f"{each.price:,.0f}"
        lines.append(
            f"{name:24}{change_in_words(each.changes):20}{_gib(on.needed):>10}{on.tokens_per_second:>14,.0f}"
            f"{on.hours:>9,.1f}{on.hours * on.world:>10,.1f}{price:>11}"
        )
    best = found[0].prediction
    flags = f"--world-size {best.world} --gpu {best.cluster.device.name}"
    if found[0].changes:
        flags += f" --parallel.activation_checkpointing {found[0].changes['parallel.activation_checkpointing']}"
    return "\n".join(
        [*lines, "", *_row("cheapest", f"fits{' and ends' if within else ''}{within}; planned in full by: {flags}")]
    )


def search_as_data(found: Sequence[Suitable]) -> list[dict[str, Any]]:
    return [
        {
            "device": each.prediction.cluster.device.name,
            "changes": dict(each.changes),
            **_figures(each.prediction, None),
            "price": each.price,
        }
        for each in found
    ]


def as_data(planned: Planned) -> dict[str, Any]:
    """Return a plan as plain data: numbers in bytes, seconds and bytes a second."""
    found = planned.prediction
    return {
        "network": {
            "basis": planned.basis,
            "parameters": found.parameters.total,
            "active": found.active,
            "trained": found.parameters.trainable,
            "attention": found.attention,
        },
        "device": found.cluster.device.name,
        **point_as_data(found, planned.host_needs, planned.advice, planned.price),
        "micro_batch": {
            "largest": planned.largest_micro_batch,
            "allowed": planned.allowed_micro_batch,
            "paying": planned.paying_micro_batch,
        },
        "step_down": None
        if (down := planned.step_down) is None
        else {"changes": dict(down.changes), **_figures(down.prediction, planned.price)},
        "alternatives": [
            {"changes": dict(each.changes), **_figures(each.prediction, planned.price)} for each in planned.alternatives
        ],
        "stopping": None
        if (stopping := planned.stopping) is None
        else {
            "bytes_per_second": stopping.writing.speed,
            "measured": stopping.writing.measured,
            "save_seconds": stopping.save,
            "stop_seconds": stopping.stop,
        },
    }


def point_as_data(found: Prediction, each: HostNeeds, notes: Iterable[Advice], price: float | None) -> dict[str, Any]:
    """Return what one prediction says, without other ways."""
    return {
        **_figures(found, price),
        "memory": {
            "needed": found.needed,
            "of": int(found.cluster.device.memory),
            "peak": dict(found.memory.peak),
            "between_steps": dict(found.memory.start),
            "on_host": sorted(kind for kind in found.memory.elsewhere if found.memory.peak.get(kind)),
            "where": found.memory.where,
            "assumed": dict(found.assumed),
        },
        "host": {
            "loading": each.loading,
            "training": each.training,
            "saving": each.saving,
            "exporting": each.exporting,
            "naive": each.naive,
            "peer_copies": each.peers.memory,
            "sent_with_copy": each.peers.sent,
        },
        "storage": {
            "checkpoint": each.checkpoint,
            "kept": dict(each.kept),
            "total": each.storage,
            "by_clock": each.by_clock,
        },
        "advice": [{"id": note.id, "text": note.text, "source": note.source} for note in notes],
    }


def _figures(found: Prediction, price: float | None) -> dict[str, Any]:
    seconds = found.seconds
    return {
        "gpus": found.world,
        "fits": found.fits,
        "needed_bytes": found.needed,
        "step_seconds": seconds.step,
        "step_seconds_between": list(found.interval),
        "compute_seconds": seconds.compute,
        "moving_seconds": seconds.moving,
        "update_seconds": seconds.update,
        "offloading_seconds": seconds.offloading,
        "bound": seconds.bound,
        "bytes_inside": seconds.inside,
        "bytes_between": seconds.between,
        "bytes_of_attention": seconds.exchanged,
        "bytes_of_sums": seconds.added,
        "tokens_per_second_per_gpu": found.tokens_per_second,
        "mfu": found.mfu,
        "hours": found.hours,
        "gpu_hours": found.hours * found.world,
        "price": cost(found, price),
    }
