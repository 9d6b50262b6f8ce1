"""Convert optimizers, by transformers' names for them."""

from __future__ import annotations

from raytune_fsdp.config.schema import sections_of
from raytune_fsdp.config.sections.optimizers import OptimizerChoice
from raytune_fsdp.convert.rules import Translation, ask, number, text

_FIELD = "optim.optimizer"
_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adamw_apex_fused",
    "adamw_hf",
    "adamw_anyprecision",
    "paged_adamw",
    "paged_adamw_32bit",
)
_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit")
_FEWER_BITS = ("adamw_torch_4bit", "ao_adamw_4bit", "ao_adamw_fp8")
_LION = ("lion", "lion_32bit", "paged_lion", "paged_lion_32bit")
_LION_8BIT = ("lion_8bit", "paged_lion_8bit")
_OF_ADAMW = {"adam_beta1": "optim.beta1", "adam_beta2": "optim.beta2", "adam_epsilon": "optim.eps"}


def optimizer(c: Translation, key: str) -> None:
    name = c.get(key, text, "")
    if name in _ADAMW:
        c.say(key, "same", "AdamW")
    elif name in _EIGHT_BITS + _FEWER_BITS:
        groups = "groups of 256 within a row, rounded stochastically"
        note = groups if name in _EIGHT_BITS else f"here in 8 bits: {groups}"
        c.carry(key, _FIELD, {"type": "adamw", "moments": "8bit"}, note)
    elif name == "adafactor":
        c.carry(key, _FIELD, {"type": "adafactor"})
    elif name in _LION + _LION_8BIT:
        betas = {"beta1": c.get("adam_beta1", number, 0.9), "beta2": c.get("adam_beta2", number, 0.999)}
        c.carry(key, _FIELD, {"type": "lion", **betas}, "" if name in _LION else "here its moment is not rounded")
    elif name == "sgd":
        c.carry(key, _FIELD, {"type": "sgd", "momentum": 0.0})
    elif "muon" in name:
        c.say(key, "refused", "its steps have other sizes there: set optim.optimizer.type=muon and another optim.lr")
    else:
        *kinds, last = sections_of(OptimizerChoice)
        c.say(key, "refused", f"the optimizers here are {', '.join(kinds)} and {last}: see optim.optimizer")


def _of_adamw(c: Translation, key: str) -> None:
    """Carry an option of AdamW; other optimizers refuse its fields."""
    name = c.get(c.first("optim", "optimizer"), text, "")
    if name in _LION + _LION_8BIT and key != "adam_epsilon":
        c.say(key, "same", f"in {_FIELD}")
    elif name in (*_LION, *_LION_8BIT, "adafactor", "sgd"):
        c.say(key, "left", f"means nothing to {name}, there as here")
    else:
        c.carry(key, _OF_ADAMW[key], c.get(key, number, 0.0))


def betas(c: Translation, key: str, instead: str = "") -> None:
    """Carry a list of AdamW's two betas. `instead`: what to do with those of another optimizer."""
    found = c.get(key, lambda value: [number(each) for each in value] if isinstance(value, list) else [], [])
    if len(found) != 2:
        c.say(key, "refused", "must be two numbers")
    elif instead:
        c.say(key, "refused", instead)
    else:
        c.put("optim.beta1", found[0], key)
        c.carry(key, "optim.beta2", found[1], f"and optim.beta1={found[0]}")


# The options that only some optimizers have.
ADAMW_OPTIONS = tuple(ask(name, f"`{field}`; in `{_FIELD}` with Lion", _of_adamw) for name, field in _OF_ADAMW.items())
