"""Read the variables that torchrun sets for a process. The only reader of RANK, WORLD_SIZE and the like.

Ray Train sets some of the same variables for its workers, so code that runs under Ray must not ask here.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


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


def meeting(minutes: float) -> tuple[Store, int, int]:
    """Return the store where the ranks of a process group meet, this process's rank, and how many they are."""
    from torch._C._distributed_c10d import PrefixStore  # imported here: few who ask for a rank need torch
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=minutes)))
    # With --max-restarts torchrun's store lives on: what earlier ranks have left there, such as their addresses, would
    # be taken for what these say.
    return PrefixStore(f"raytune_fsdp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), rank, world


def ranks_here() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
