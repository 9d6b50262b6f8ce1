"""Read the variables that torchrun sets for a process. The only reader of RANK, WORLD_SIZE and the like.

Ray Train sets some of the same variables for its workers, so code that runs under Ray must not ask here.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from raytune_fsdp.base.errors import TrainingError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_COMES, _ANSWER, _ALL = "raytune_fsdp/comes", "raytune_fsdp/answer", "raytune_fsdp/all"
"""Keys of torchrun's store: what a rank is called, what rank 0 answers to that name, and how many have read it."""
_LOOK_SECONDS = 0.1


def under_torchrun() -> bool:
    """Return whether torchrun has started this process, as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_of_torchrun() -> int:
    return int(os.environ["WORLD_SIZE"])


def is_rank0() -> bool:
    """Return whether this process reports for the run: torchrun did not start it, or started it as rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


class Meeting(NamedTuple):
    """Where the ranks of a process group meet."""

    store: Store
    rank: int
    """That of this process."""
    world: int


def meet(minutes: float) -> Meeting:
    """Wait until all ranks have come to torchrun's store, and return where only they meet.

    That store outlives ranks: with `--max-restarts`, and where a process trains twice. What earlier ones have left
    there, such as their addresses, would be taken for that of these. No count tells them apart, as each node counts its
    own failures. So each rank comes with a name that it has just made up, and rank 0 answers with one for all.
    """
    from torch._C._distributed_c10d import PrefixStore  # imported here: few who ask for a rank need torch
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=minutes)))
    name, late = uuid4().hex, time.monotonic() + 60 * minutes
    if rank == 0:
        known: set[bytes] = set()
        while (missing := world - 1 - store.add(f"{_ALL}/{name}", 0)) > 0:
            for key in (f"{_COMES}/{other}" for other in range(1, world)):
                if store.check([key]) and (own := store.get(key)) not in known:
                    known.add(own)  # it may be that of a rank which has died
                    store.set(f"{_ANSWER}/{own.decode()}", name)
            if time.monotonic() > late:
                raise TrainingError(
                    f"{missing} of {world} ranks have not come within cluster.collective_minutes={minutes:g}: see what "
                    "torchrun has printed on the other machines"
                )
            time.sleep(_LOOK_SECONDS)
        return Meeting(PrefixStore(name, store), rank, world)
    try:
        store.set(f"{_COMES}/{rank}", name)
        name = store.get(f"{_ANSWER}/{name}").decode()
        store.add(f"{_ALL}/{name}", 1)
    except DistError as error:
        raise TrainingError(
            f"rank 0 has ended, or has not come within cluster.collective_minutes={minutes:g}: see what it has printed"
        ) from error
    return Meeting(PrefixStore(name, store), rank, world)


def ranks_here() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
