"""Groups: documents of one row that stay together. How they are cut, and which other answer follows a judged one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raytune_fsdp.base.batch import IGNORE, Role
from raytune_fsdp.data.mixture import Permutation
from raytune_fsdp.data.rows.formats import Document
from raytune_fsdp.data.rows.pairs import shared_of


def judged(document: Document, mismatched: Document, length: int) -> Document:
    """Return a judged document with its mismatched one, in so many tokens if they fit.

    The mismatched answer is not the row's own, so its end is cut before anything else, down to one target: what becomes
    of a row does not depend on another one.
    """
    least = int(np.argmax(mismatched.labels[1:] != IGNORE)) + 2
    mismatched = mismatched.cut(max(least, length - len(document.input_ids)))
    return replace(document, others=(mismatched,), shared=shared_of((document, mismatched)))


def length_of(document: Document) -> str:
    """Return the length of a document, or of those of its group, in words."""
    if not document.others:
        return f"{len(document.input_ids)} tokens"
    each = " and ".join(str(len(member.input_ids)) for member in document.members)
    names = "its chosen and rejected side"
    if document.columns[0] != Role.CHOSEN:
        names = "its answer and the first token of the mismatched one"
    return f"{each} tokens ({names}, which stay together), {document.length} in all"


def cut_to(document: Document, length: int) -> Document | None:
    """Return a document, or a group, of at most so many tokens; None if no target would be left, or no whole answer.

    A group loses the same tokens at the start of all its documents.
    """
    if not document.others:
        found = document.cut(length)
        return found if found.target_tokens else None
    excess = max(0, document.length - length)
    gone = min(document.shared, -(-excess // len(document.members)))
    members = [_from(each, gone) for each in document.members]
    if gone * len(members) < excess or not all(each.target_tokens for each in members):
        return None
    return replace(members[0], others=tuple(members[1:]), shared=document.shared - gone)


def _from(document: Document, start: int) -> Document:
    """Return the document without its first tokens."""
    *told, skipped = document.columns
    targets = int((document.labels[1 : start + 1] != IGNORE).sum())
    return replace(
        document,
        input_ids=document.input_ids[start:],
        labels=document.labels[start:],
        columns=(*told, max(0.0, skipped - targets)),
    )


# Judged answers need a mismatched one each: their prompt with another row's answer, from which KTO estimates its KL.
#
# The rows of a dataset that a window keeps are put into an order by a key, as a circle. Each row gets the answer of the
# row that comes next or, where that is equal to its own, of the first one after it that is not. So no row gets its own
# answer, and where no two are equal every answer is used once. Where all of them are equal, or there is only one, they
# get that of a row that follows in the files.


def partners(answers: Sequence[bytes], *, key: int) -> list[int] | None:
    """Return for each row the number of the row whose answer it gets; None if all rows have the same answer."""
    order = Permutation(len(answers), key=key)
    circle = [order(place) for place in range(len(answers))]
    # Backwards from a place where the answer changes: a row with the same answer as the next one gets what that gets.
    begins = next((at for at, row in enumerate(circle) if answers[row] != answers[circle[at - 1]]), None)
    if begins is None:
        return None
    circle = [*circle[begins:], *circle[:begins]]
    found, after = [0] * len(answers), circle[0]
    for row in reversed(circle):
        found[row] = after if answers[row] != answers[after] else found[after]
        after = row
    return found
