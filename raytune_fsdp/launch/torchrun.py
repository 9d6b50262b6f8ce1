"""Read the variables that torchrun sets for a process. The only reader of RANK, WORLD_SIZE and the like.

Ray Train sets some of the same variables for its workers, so code that runs under Ray must not ask here.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from raytune_fsdp.base.errors import TrainingError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_COMES, _ANSWER, _ALL = "raytune_fsdp/comes", "raytune_fsdp/answer", "raytune_fsdp/all"
"""Keys of torchrun's store: what a rank is called, what rank 0 answers to that name, and which ranks have read it."""
_MEETING = "raytune_fsdp/meeting"
"""Key of torchrun's store: the meeting that rank 0 has called last."""
_OVER = "raytune_fsdp/over"
"""Key of a meeting's store: rank 0 has died and calls another one."""
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


class Meeting:
    """Where the ranks of a process group meet: in torchrun's store, below a name that rank 0 has made up."""

    def __init__(self, base: Store, rank: int, world: int, name: str) -> None:
        from torch._C._distributed_c10d import PrefixStore  # imported here: few who ask for a rank need torch

        self.store = PrefixStore(name, base)
        self.rank, self.world = rank, world
        self._base, self.name = base, name
        self._answered: set[bytes] = set()

    def answer(self) -> int:
        """Let those know of this meeting who have come, on rank 0; return how many ranks have yet to read that.

        A rank that has died comes again, under another name: torchrun may have started it again without the others.
        """
        for rank in range(1, self.world):
            key = f"{_COMES}/{rank}"
            if self._base.check([key]) and (own := self._base.get(key)) not in self._answered:
                self._answered.add(own)  # it may be that of a rank which has died
                self._base.set(f"{_ANSWER}/{own.decode()}", self.name)
        return sum(not self.store.check([f"{_ALL}/{rank}"]) for rank in range(1, self.world))

    def is_over(self) -> bool:
        """Return whether rank 0 has been started again without this rank, and calls another meeting."""
        return self.store.check([_OVER])


def meet(minutes: float) -> Meeting:
    """Wait until all ranks have come to torchrun's store, and return where only they meet.

    That store outlives ranks: with `--max-restarts`, and where a process trains twice. What earlier ones have left
    there, such as their addresses, would be taken for that of these. No count tells them apart, as each node counts its
    own failures. So each rank comes with a name that it has just made up, and rank 0 answers with one for all.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=minutes)))
    return _call(store, world, minutes) if rank == 0 else _come(store, rank, world, minutes)


def _call(store: Store, world: int, minutes: float) -> Meeting:
    """On rank 0: call a meeting, and wait for the others."""
    meeting, late = Meeting(store, 0, world, uuid4().hex), time.monotonic() + 60 * minutes
    if store.check([_MEETING]):
        Meeting(store, 0, world, store.get(_MEETING).decode()).store.set(_OVER, "")
    store.set(_MEETING, meeting.name)
    while missing := meeting.answer():
        if time.monotonic() > late:
            raise TrainingError(
                f"{missing} of {world} ranks have not come within cluster.collective_minutes={minutes:g}: see what "
                "torchrun has printed on the other machines"
            )
        time.sleep(_LOOK_SECONDS)
    return meeting


def _come(store: Store, rank: int, world: int, minutes: float) -> Meeting:
    """On the other ranks: come to the meeting."""
    from torch.distributed import DistError

    own, late = uuid4().hex, time.monotonic() + 60 * minutes
    answer = f"{_ANSWER}/{own}"
    try:
        store.set(f"{_COMES}/{rank}", own)
        while not store.check([answer]):  # `get` would wait in C++, deaf to signals
            if time.monotonic() > late:
                raise TrainingError(_no_rank0(minutes))
            time.sleep(_LOOK_SECONDS)
        meeting = Meeting(store, rank, world, store.get(answer).decode())
        meeting.store.set(f"{_ALL}/{rank}", "")
    except DistError as error:
        raise TrainingError(_no_rank0(minutes)) from error
    return meeting


def _no_rank0(minutes: float) -> str:
    return f"rank 0 has ended, or has not come within cluster.collective_minutes={minutes:g}: see what it has printed"


def ranks_here() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
