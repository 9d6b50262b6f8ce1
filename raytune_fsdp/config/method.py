"""`method`: which weights are trained."""

from __future__ import annotations

from typing import Literal

from raytune_fsdp.config.base import Section


class FullMethod(Section):
    type: Literal["full"] = "full"
    """Every weight is trained."""
