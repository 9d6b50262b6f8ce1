"""Convert what all projects do alike with reward models: a head that scores, also beside adapters."""

from __future__ import annotations

from raytune_fsdp.convert.preferences import carry_objective
from raytune_fsdp.convert.rules import Translation, in_words, words

_ALWAYS = "the head is trained whole, also beside adapters"
_MODULES = ("score", "v_head", "classifier")
"""What a head is called in files of other projects."""


def carry_reward(c: Translation, center: str = "") -> None:
    """Carry Bradley and Terry's loss, and the head that it is of. `center`: the key of what draws scores to 0."""
    carry_objective(c, "reward", {"center": (center, None)} if center else {})
    c.put("model.head.type", "score")


def without_head(c: Translation, saved: str) -> None:
    """Carry the modules that are trained whole beside adapters, but the head, which is trained in any case.

    `saved`: their key. Elsewhere a head that it does not name stays as it was drawn.
    """
    named = c.get(saved, words, [])
    if others := [name for name in named if name not in _MODULES]:
        c.carry(saved, "method.modules_to_save", others)
    elif named:
        c.say(saved, "same", _ALWAYS)
    if len(others) == len(named):
        c.tell_default("model.head", {"type": "score"}, f"{_ALWAYS}; there only if {saved} names it")


def objective_in_words(c: Translation) -> str:
    return f"{in_words('train.objective', c.fields['train.objective'])}, model.head.type=score"
