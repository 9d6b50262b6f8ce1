"""`eval`: how often the model is measured while it trains."""

from __future__ import annotations

from pydantic import Field

from raytune_fsdp.config.base import Section


class EarlyStopConfig(Section):
    metric: str | None = None
    """The metric that has to improve, such as `eval/<dataset>/loss`. Null: the mean loss over all datasets. Higher is better for metrics whose names end in `accuracy`, `accuracy_normalised` or `exact_match`."""

    patience: int = Field(default=3, ge=1)
    """Evaluations in a row without an improvement after which the run ends."""

    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How much better than the best one before it an evaluation must be to count as an improvement. Less than a millionth of the value never counts: that is rounding, which differs with the number of ranks."""


class EvalConfig(Section):
    every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations. Null: only at the end."""

    at_start: bool = False
    """Evaluate before the first step too."""

    early_stop: EarlyStopConfig | None = None
    """End the run when its evaluations no longer improve: at the same step on any number of ranks, whatever happens in between. Null: it trains to its last step."""

    prompts: list[str] = Field(default_factory=list)
    """Prompts that the model answers at every evaluation."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of those answers, in tokens."""
