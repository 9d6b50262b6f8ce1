"""`profile`: steps to look at closely."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raytune_fsdp.config.base import Section


class ProfileConfig(Section):
    steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list, max_length=20)
    """Steps to record with torch's profiler. Each rank writes a trace and a table of what took longest to `profile/` in
    the run directory. A recorded step is slower; what it learns is the same."""
