"""Convert what all projects do alike with teachers: whose predictions are learned, and by which divergence."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.convert.rules import Translation, in_words

MIXED = (
    "between 0 and 1 it is the divergence of both from their mixture there; here the two divergences have weights of "
    "their own (train.objective.forward and reverse): write 0 or 1"
)
ON_POLICY = "a student learns what a teacher says of the rows, not of answers that it writes itself while it trains"
NAME_IT = (
    "what a teacher says is computed here, before training, not read from rows or asked of a server: name its model "
    "with --teacher"
)
ALL_OTHERS = "of all other tokens their sum counts, as one token more"


def carry_distillation(c: Translation, beta: float, weight: float = 1.0, cross_entropy: float = 0.0) -> None:
    """Carry the objective: `beta` is 0 for the divergence from the teacher to the student, and 1 for the reverse."""
    made: dict[str, Any] = {"type": "distill"}
    if beta == 1:
        made |= {"forward": 0.0, "reverse": weight}
    elif weight != 1:
        made["forward"] = weight
    if cross_entropy:
        made["cross_entropy"] = cross_entropy
    c.put("train.objective", made)


def objective_in_words(c: Translation) -> str:
    return in_words("train.objective", c.fields["train.objective"])
