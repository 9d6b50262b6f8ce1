"""Convert schedules of the learning rate, by transformers' names for them, and their warmup."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.rules import NotHereError, Translation, number, text, whole


def ratio(least: Any, lr: float) -> float:
    """Return a learning rate as a fraction of the peak, without the digits that a division of decimals adds."""
    return float(f"{number(least) / lr:.12g}")


def _schedule(c: Translation, kind: str, details: dict[str, Any], lr: float) -> dict[str, Any]:
    """Return our schedule by transformers' name for it. What it leaves in `details` was not understood."""

    def take(name: str, default: Any) -> Any:
        value = details.pop(name, None)
        return default if value is None else value

    if kind in ("constant", "constant_with_warmup"):
        return {"type": "constant"}
    if kind == "linear":
        return {"type": "linear"}
    if kind == "cosine" and take("num_cycles", 0.5) == 0.5:
        return {"type": "cosine"}
    if kind == "cosine_with_restarts" and take("num_cycles", 1) == 1:
        return {"type": "cosine"}
    if kind == "cosine_with_min_lr" and take("num_cycles", 0.5) == 0.5:
        rate, least = take("min_lr_rate", None), take("min_lr", None)
        return {
            "type": "cosine",
            "floor": ratio(least, lr) if rate is None and least is not None else number(rate or 0),
        }
    if kind == "polynomial":
        floor, power = ratio(take("lr_end", 1e-7), lr), number(take("power", 1.0))
        return {"type": "linear", "floor": floor} if power == 1 else {"type": kind, "power": power, "floor": floor}
    if kind == "inverse_sqrt":
        timescale = take("timescale", None)
        return {"type": kind, **({} if timescale is None else {"timescale": whole(timescale)})}
    if kind == "warmup_stable_decay":
        total, decay = c.fields.get("train.max_steps"), take("num_decay_steps", None)
        if take("decay_type", "cosine") != "linear" or take("warmup_type", "linear") != "linear":
            raise NotHereError("in `wsd` here the learning rate rises and falls linearly")
        if total is None or decay is None:
            raise NotHereError(
                "`wsd` here takes the fraction of the steps that decay: give max_steps and num_decay_steps"
            )
        return {"type": "wsd", "decay": whole(decay) / total, "floor": number(take("min_lr_ratio", 0))}
    raise NotHereError(
        "no schedule of ours; there are constant, linear, cosine, polynomial, inverse_sqrt, one_cycle and wsd"
    )


def schedule(c: Translation, key: str, *, default: str, default_lr: float) -> str:
    """Carry the schedule and its details; return the project's name for it."""
    kind, prefix = c.get(key, text, default), "lr_scheduler_kwargs."
    keys = [name for name in c.given if name.startswith(prefix)]
    details = {name.removeprefix(prefix): spelled(c.given[name]) for name in keys}
    if c.given.get("lr_scheduler_kwargs") not in (None, {}):
        c.say("lr_scheduler_kwargs", "refused", "must be a map, or a map as JSON text")
    try:
        ours = _schedule(c, kind, details, c.get("learning_rate", number, default_lr) or default_lr)
        if details:
            raise NotHereError(f"{kind} has no {', '.join(details)} here")
    except ValueError as error:
        c.say_all((key, *keys), "refused", str(error), key if key in c.given else "")
        return kind
    c.carry_all((key, *keys), "optim.schedule", ours)
    if kind != "cosine":
        c.default("optim.schedule", ours, f"{key} is {kind} by default")
    return kind


AHEAD = "ours is one step ahead until it ends, as their first step has a rate of 0"


def warmup(c: Translation, kind: str) -> None:
    """Carry the warmup: steps count before a fraction, and a constant schedule without warmup ignores both."""
    steps, ratio = c.get("warmup_steps", number, 0), c.get("warmup_ratio", number, 0)
    if kind == "constant":
        c.default("optim.warmup_ratio", 0.0, "the schedule `constant` has no warmup")
        c.say_all(("warmup_steps", "warmup_ratio"), "same", "the schedule `constant` has no warmup, there either")
    elif steps >= 1:
        c.carry("warmup_steps", "optim.warmup_steps", int(steps), AHEAD)
        c.say("warmup_ratio", "left", "warmup_steps decides, there too")
    elif steps > 0:
        c.carry("warmup_steps", "optim.warmup_ratio", steps, f"below 1 it is a fraction; {AHEAD}")
        c.say("warmup_ratio", "left", "warmup_steps decides, there too")
    else:
        c.carry_all(("warmup_ratio", "warmup_steps"), "optim.warmup_ratio", ratio, AHEAD if ratio else "")
