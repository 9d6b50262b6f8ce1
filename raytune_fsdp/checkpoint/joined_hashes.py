"""Join what all ranks have hashed, by pairs: no rank gets a message from each of the others.

Rank 0 would otherwise parse and join what all have sent, while it trains: for a 70B with its moments on 512 ranks that
took 3.1 s of processor time. Ranks that follow each other have rows that do, so their hashes meet in larger nodes, and
what is sent does not grow on its way to rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytune_fsdp.base.row_hashes import HashedRows
from raytune_fsdp.checkpoint.writing import Hashes, PieceLayout


def receiver(rank: int) -> int:
    """Return the rank to which this one sends what it has joined: its own number without the lowest bit."""
    return rank & (rank - 1)


def senders(rank: int, world: int) -> list[int]:
    """Return the ranks whose `receiver` this one is."""
    found, distance = [], 1
    while distance < world and rank % (2 * distance) == 0:
        found += [rank + distance] if rank + distance < world else []
        distance *= 2
    return found


def join_by_pairs(
    mine: Hashes | str,
    layout: PieceLayout,
    *,
    rank: int,
    world: int,
    send: Callable[[object], None],
    receive: Callable[[int], Any],
) -> Hashes | str | None:
    """Join what this rank has hashed with what it receives, and send it on; on rank 0, return it. All ranks call this.

    A text is for a rank that has nothing, and says why; then there is no digest. `send` sends to the `receiver` of this
    rank, and `receive` takes what another one has sent; both deal in plain lists.
    """
    found = mine if isinstance(mine, str) else _joined(layout, [mine])
    for sender in senders(rank, world):
        theirs = receive(sender)  # in any case: nothing stays where it was sent to
        if isinstance(found, str) or isinstance(theirs, str):
            found = found if isinstance(found, str) else theirs
        else:
            found = _joined(layout, [found, _from_plain(theirs)])
    if rank == 0:
        return found
    send(found if isinstance(found, str) else to_plain(found))
    return None


def to_plain(hashes: Hashes) -> dict[str, Any]:
    """Return hashes as they are sent."""
    return {name: [(each.nodes, each.ends) for each in rows] for name, rows in hashes.items()}


def digests_of(joined: Hashes, layout: PieceLayout) -> dict[str, str]:
    """Return the digest of every tensor from what all ranks have hashed of it."""
    return {name: rows.digest(joined.get(name, ())) for name, (rows, _) in layout.rows.items()}


def _joined(layout: PieceLayout, parts: Sequence[Hashes]) -> Hashes:
    names = {name: None for part in parts for name in part}
    return {name: [layout.rows[name][0].joined(r for part in parts for r in part.get(name, ()))] for name in names}


def _from_plain(message: Mapping[str, Any]) -> Hashes:
    return {name: [HashedRows(*each) for each in rows] for name, rows in message.items()}
