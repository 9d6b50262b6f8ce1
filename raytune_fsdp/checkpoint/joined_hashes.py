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


def join_by_pairs(
    mine: Hashes | None,
    layout: PieceLayout,
    *,
    rank: int,
    world: int,
    send: Callable[[object], None],
    receive: Callable[[int], Any],
) -> Hashes | None:
    """Join what this rank has hashed with what it receives, and send it on; on rank 0, return it. All ranks call this.

    None is for a rank whose part has failed; then there is no digest. `send` sends to the `receiver` of this rank, and
    `receive` takes what another one has sent; both deal in plain lists.
    """
    found = None if mine is None else _joined(layout, [mine])
    distance = 1
    while distance < world and rank % (2 * distance) == 0:
        if rank + distance < world:
            theirs = receive(rank + distance)
            found = None if found is None or theirs is None else _joined(layout, [found, _from_plain(theirs)])
        distance *= 2
    if rank == 0:
        return found
    send(None if found is None else {name: [(each.nodes, each.ends) for each in rows] for name, rows in found.items()})
    return None


def digests_of(joined: Hashes, layout: PieceLayout) -> dict[str, str]:
    """Return the digest of every tensor from what all ranks have hashed of it."""
    return {name: rows.digest(joined.get(name, ())) for name, (rows, _) in layout.rows.items()}


def _joined(layout: PieceLayout, parts: Sequence[Hashes]) -> Hashes:
    names = {name: None for part in parts for name in part}
    return {name: [layout.rows[name][0].joined(r for part in parts for r in part.get(name, ()))] for name in names}


def _from_plain(message: Mapping[str, Any]) -> Hashes:
    return {name: [HashedRows(*each) for each in rows] for name, rows in message.items()}
