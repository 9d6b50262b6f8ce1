"""Read the variables that torchrun sets for a process. The only reader of RANK, WORLD_SIZE and the like.

Ray Train sets some of the same variables for its workers, so code that runs under Ray must not ask here.
"""

from __future__ import annotations

import os


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


def round_of_torchrun() -> int:
    """Return how often torchrun has started the ranks again (`--max-restarts`). Its store outlives each round."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def ranks_here() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
