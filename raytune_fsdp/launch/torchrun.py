"""What torchrun tells a process by its environment. The only reader of RANK, WORLD_SIZE and their kin."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
