"""What of its parent's identity a fork may change: how steps are taken, not what they are taken on.

The optimizer's state must mean the same afterwards, and the samples must be the same ones. So whatever decides the
shape of that state, the order of the samples or the network is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FORK = "run.fork"
"""The entry of a fork's identity: the step and the digest of the checkpoint that it began with, and the keys that it
changed. The name and the path of its parent decide nothing."""

MAY_CHANGE = (
    "a fork may change optim (but optimizer.type, optimizer.moments, groups, and whether sgd has a momentum), its "
    "length, and the numbers of train.objective (but with sft.over=all not whether sft.weight is 0), label_smoothing, "
    "z_loss, router_aux_loss_coef and router_z_loss_coef"
)
_COEFFICIENTS = {
    "train.label_smoothing", "train.z_loss", "train.router_aux_loss_coef", "train.router_z_loss_coef",
}  # fmt: skip
# An identity leaves optim.optimizer out if it is AdamW with moments as usual.
_GROUPS = "optim.groups"
_OF_STATE = {"optim.optimizer", "optim.optimizer.type", "optim.optimizer.moments", _GROUPS}
_MOMENTUM, _WITHOUT_STATE = "optim.optimizer.momentum", "sgd"
_SFT_WEIGHT = "train.objective.sft.weight"
_COUNTED = ("train.objective.desirable_weight", "auto")
"""A number that follows from the data."""


def allowed_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a fork changes of what it may, by dotted keys, with both values; None: not set."""
    chosen = before.get("optim.optimizer")
    optimizer = chosen.get("type") if isinstance(chosen, Mapping) else None
    objective = before.get("train.objective")
    term = objective.get("sft") if isinstance(objective, Mapping) else None
    over = term.get("over") if isinstance(term, Mapping) else None
    differing = _differing(before, now)
    return {key: (old, new) for key, old, new in differing if may_change(key, old, new, optimizer=optimizer, over=over)}


def with_allowed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parent's identity with what its fork has of all that it may change. What is left to differ may not."""
    free = allowed_changes(before, now).keys()
    merged = _merged(before, now, free)
    merged.pop(FORK, None)  # its parent may be a fork itself
    return merged | ({FORK: now[FORK]} if FORK in now else {})


def _merged(before: Mapping[str, Any], now: Mapping[str, Any], free: Any, path: str = "") -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in dict.fromkeys((*before, *now)):
        name, old, new = f"{path}{key}", before.get(key), now.get(key)
        if name in free:
            if key in now:
                merged[key] = new
        elif isinstance(old, Mapping) and isinstance(new, Mapping):
            merged[key] = _merged(old, new, free, f"{name}.")
        elif key in before:
            merged[key] = old
    return merged


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the values that differ, inside of sections too: their dotted keys, the one before and the one now."""
    for key in dict.fromkeys((*before, *now)):
        name, old, new = f"{path}{key}", before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differing(old, new, f"{name}.")
        elif old != new or (key in before) != (key in now):
            yield name, old, new


def may_change(key: str, old: Any, new: Any, *, optimizer: str | None = None, over: str | None = None) -> bool:
    """Return whether a fork may change an entry of its parent's identity from one value to another.

    `optimizer`, `over`: the type, and the tokens of the cross-entropy, that both have; None: any, so what may not
    change with one of them may not.
    """
    if key.startswith("optim."):
        # Without momentum SGD keeps no sum of gradients; Muon always keeps its mean.
        keeps = key != _MOMENTUM or optimizer not in (None, _WITHOUT_STATE) or bool(old) == bool(new)
        return key not in _OF_STATE and not key.startswith(f"{_GROUPS}.") and keeps
    if key == _SFT_WEIGHT and over != "answer" and bool(old) != bool(new):
        return False  # prompts become targets, or stop being any, so that other rows are bad, and packed
    if key.startswith("train.objective."):
        return not key.endswith(".type") and all(_is_numeric(each) or (key, each) == _COUNTED for each in (old, new))
    return key in _COEFFICIENTS


def _is_numeric(value: Any) -> bool:
    """Return whether a value is a number, numbers of classes, or the absence of either."""
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
