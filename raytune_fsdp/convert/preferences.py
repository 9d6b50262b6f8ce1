"""Convert what all projects do alike with preferences, and with reward models, which learn from them.

That is an objective, samples of two documents, no dropout; a head that scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter

from raytune_fsdp.config.sections.objectives import ObjectiveChoice
from raytune_fsdp.config.text import put_at
from raytune_fsdp.convert.rules import Said, Translation, flag, in_words, number, words

PAIRS = "preference"
JUDGED = "binary"
TOO_LONG = (
    "what does not fit is cut off the end of an answer there, and off the start of the prompt here; a row whose answers"
    " alone do not fit is left out"
)
TWO_DOCUMENTS = {
    PAIRS: "the limit of a document there, and a sample holds both answers with their prompts",
    JUDGED: "the limit of a document there, and a sample holds an answer and the one that KTO's KL is measured on",
}
EACH_TOKEN = "there each pair's mean over its tokens counts alike, here each token"
_OWN_DROPOUT = (
    "the model's own dropout is off there, and here as its config.json says: where that has rates above 0 (GPT-2, OPT, "
    "Phi-2), set them to 0 in model.overrides"
)
LOSSES: dict[str, dict[str, str]] = {
    "sigmoid": {},
    "hinge": {"loss": "hinge"},
    "robust": {"loss": "robust"},
    "sigmoid_norm": {"normalize": "length"},
    "ipo": {},
}
"""TRL's losses of pairs that are ours, too."""
_OBJECTIVE: TypeAdapter[Any] = TypeAdapter(ObjectiveChoice)


def carry_objective(
    c: Translation,
    kind: str,
    numbers: Mapping[str, tuple[str, float | None]],
    notes: Mapping[str, str] | None = None,
    **fixed: Any,
) -> None:
    """Carry an objective of type `kind`, if the file says nothing else of it.

    `numbers`: for each of its fields the key that sets it, and what the other project has without it (None: nothing).
    `fixed`: fields that other keys have decided.
    """
    made: dict[str, Any] = {"type": kind, **fixed}
    usual = _OBJECTIVE.validate_python({"type": kind})
    for field, (key, theirs) in numbers.items():
        value = c.get(key, number, theirs)
        if value is None or (key not in c.given and value == attrgetter(field)(usual)):
            continue
        put_at(made, field, value)
        named = f"train.objective.{field}"
        if key in c.given:
            c.sources[tuple(named.split("."))] = f"{key} in {c.file}"
            note = (notes or {}).get(field, "")
            c.say(key, "carried", f"{in_words(named, value)}{note and f': {note}'}")
        else:
            c.tell_default(named, value, f"{key} by default")
    c.put("train.objective", made)


def sample_of_two(c: Translation, key: str, length: int, rows: str) -> None:
    """Carry the limit of a document to the length of a sample, which holds two of them."""
    c.carry(key, "data.seq_len", 2 * length, f"twice {length}, {TWO_DOCUMENTS[rows]}")
    c.default("data.seq_len", 2 * length, f"twice {length}, {key} by default: {TWO_DOCUMENTS[rows]}")


def no_dropout(c: Translation, key: str, why: str) -> None:
    """Turn off the dropout of adapters, before they are carried."""
    if key in c.given:
        c.put("method.dropout", 0.0, key)
        c.say(key, "left", f"{why}: method.dropout=0.0")
    else:
        c.default("method.dropout", 0.0, why)


def turn_off_dropout(c: Translation, *, adapts: bool) -> None:
    """Settle TRL's `disable_dropout`. `adapts`: whether there are adapters."""
    key = "disable_dropout"
    if not c.get(key, flag, True):
        c.say(key, "same", "dropout as the model's config.json and method.dropout say")
        return
    if adapts:
        no_dropout(c, "lora_dropout", f"{key}, on by default, turns off that of adapters, too")
    if key in c.given:
        c.say(key, "left", f"{'method.dropout=0.0; ' if adapts else ''}{_OWN_DROPOUT}")
    else:
        tell_own_dropout(c)


def tell_own_dropout(c: Translation) -> None:
    """Say what a trainer does that turns off the dropout of whatever model."""
    c.unsaid.append(("model.overrides", Said("default", _OWN_DROPOUT)))


def losses_of_pairs(c: Translation, types: str, shares: str) -> tuple[str, float]:
    """Return TRL's loss of pairs, and the weight of the cross-entropy besides.

    `types`, `shares`: the keys that name the losses and their weights.
    """
    names = c.get(types, words, ["sigmoid"])
    unknown = [name for name in names if name not in (*LOSSES, "sft")]
    pairs = [name for name in names if name in LOSSES]
    if unknown:
        why = f"{', '.join(unknown)} is not here; a loss of pairs is {', '.join(LOSSES)}, and sft may go with it"
        c.say(types, "refused", why)
    elif len(pairs) != 1 or len(names) - len(pairs) > 1:
        why = f"one loss of pairs ({', '.join(LOSSES)}), and sft with it, is what an objective has here"
        c.say(types, "refused", why)
    if types in c.said:
        c.say(shares, "refused", f"belongs to {types}", types)
        return "sigmoid", 0.0
    weights = c.get(shares, _numbers, [1.0] * len(names))
    if len(weights) != len(names):
        c.say(shares, "refused", f"has {len(weights)} weights for {len(names)} losses")
        return pairs[0], 0.0
    of = dict(zip(names, weights, strict=True))
    rest = of.get("sft", 0.0)
    if of[pairs[0]] != 1:
        share = f"1 for it and {rest / of[pairs[0]]:g} for sft" if of[pairs[0]] > 0 and rest else "1"
        c.say(shares, "refused", f"the weight of {pairs[0]} is 1 here: write {share}, with a rate to match")
    return pairs[0], rest


def _numbers(value: Any) -> list[float]:
    return [float(number(each)) for each in (value if isinstance(value, list) else words(value))]


_ALWAYS = "the head is trained whole, also beside adapters"
_MODULES = ("score", "v_head", "classifier")
"""What a head is called in files of other projects."""


def carry_reward(c: Translation, center: str = "") -> None:
    """Carry Bradley and Terry's loss, and the head that it is of. `center`: the key of what draws scores to 0."""
    carry_objective(c, "reward", {"center": (center, None)} if center else {})
    c.put("model.head.type", "score")


def without_head(c: Translation, saved: str) -> None:
    """Carry the modules that are trained whole along with adapters; not the head, which always is.

    `saved`: their key. Elsewhere a head that it does not name stays as it was drawn.
    """
    named = c.get(saved, words, [])
    if others := [name for name in named if name not in _MODULES]:
        c.carry(saved, "method.modules_to_save", others)
    elif named:
        c.say(saved, "same", _ALWAYS)
    if len(others) == len(named):
        c.tell_default("model.head", {"type": "score"}, f"{_ALWAYS}; there only if {saved} names it")
