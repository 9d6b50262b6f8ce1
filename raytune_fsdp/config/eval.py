"""`eval`: how often the model is measured while it trains."""

from __future__ import annotations

from pydantic import Field

from raytune_fsdp.config.base import Section


class EvalConfig(Section):
    every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations. Null: only at the end."""

    at_start: bool = False
    """Evaluate before the first step too."""

    prompts: list[str] = Field(default_factory=list)
    """Prompts that the model answers at every evaluation."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of those answers, in tokens."""
