"""LoRA, as other projects say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytune_fsdp.config.method import ALL_LINEAR
from raytune_fsdp.convert.rules import Crossing, WrongValueError, flag, number, text, whole, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A project's options for adapters by their names, and its defaults. An option that it lacks is an empty name."""

    owner: str
    """The option that asks for adapters."""
    rank: str
    alpha: str
    dropout: str
    targets: str
    saved: str
    parameters: str = ""
    stabilized: str = ""
    dora: str = ""
    ratio: str = ""
    adapter: str = ""
    defaults: tuple[int, int | None, float]
    """Rank, alpha (None: twice the rank) and dropout."""
    all_words: tuple[str, ...] = (ALL_LINEAR,)
    """How it says: all linear layers."""
    all_by_default: bool = False


def carry_lora(c: Crossing, lora: Lora) -> None:
    """Turn a project's adapters into ours."""
    c.put("method.type", "lora", lora.owner)
    c.say(lora.owner, "carried", "method.type=lora")
    rank, alpha, dropout = lora.defaults
    _value(c, lora.rank, "method.rank", c.get(lora.rank, whole, rank))
    found = c.get(lora.rank, whole, rank)
    _value(c, lora.alpha, "method.alpha", c.get(lora.alpha, whole, 2 * found if alpha is None else alpha))
    _value(c, lora.dropout, "method.dropout", c.get(lora.dropout, number, dropout))
    _targets(c, lora)
    for key, field, read in (
        (lora.saved, "method.modules_to_save", words),
        (lora.parameters, "method.target_parameters", words),
        (lora.stabilized, "method.rank_stabilized", flag),
        (lora.dora, "method.dora", flag),
        (lora.ratio, "method.lr_ratio", number),
        (lora.adapter, "method.adapter", text),
    ):
        value: Any = c.get(key, read, None) if key else None  # type: ignore[operator]
        if value not in (None, False, []):
            c.carry(key, field, value)
        c.say(key, "same", "off")


def _value(c: Crossing, key: str, field: str, value: Any) -> None:
    c.carry(key, field, value)
    if key not in c.given:
        c.default(field, value, f"{key} by default")


def _targets(c: Crossing, lora: Lora) -> None:
    asked = c.get(lora.targets, _names, None)
    if asked is not None:
        every = asked in lora.all_words or (isinstance(asked, list) and len(asked) == 1 and asked[0] in lora.all_words)
        c.carry(lora.targets, "method.target_modules", ALL_LINEAR if every else asked)
    elif lora.all_by_default:
        c.default("method.target_modules", ALL_LINEAR, f"{lora.targets} by default")
    elif "method.target_modules" not in c.fields:
        c.refuse_unsaid(
            lora.targets, "PEFT chooses modules by the kind of model: name them, or all-linear, in the file"
        )


def _names(value: Any) -> str | list[str]:
    """One word for all layers or an expression, or a list of names."""
    if isinstance(value, list):
        return [text(each) for each in value]
    found = text(value)
    if not found.strip():
        raise WrongValueError("must name modules")
    return words(found) if "," in found else found
