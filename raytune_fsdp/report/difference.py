"""`from raytune_fsdp.report.difference import difference`, as scripts of users have it."""

from __future__ import annotations

from raytune_fsdp.record.report.difference import Difference, difference

__all__ = ["Difference", "difference"]
