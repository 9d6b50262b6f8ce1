"""`eval`: how often the model is measured while it trains."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.base import Section


class EarlyStopConfig(Section):
    metric: str | None = None
    """The metric that has to improve, such as `eval/<dataset>/loss`. Null: the mean loss over all datasets. Higher is better for metrics whose names end in `accuracy`, `accuracy_normalised` or `exact_match`."""

    patience: int = Field(default=3, ge=1)
    """Evaluations in a row without an improvement after which the run ends."""

    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How much better than the best one before it an evaluation must be to count as an improvement. Less than a millionth of the value never counts: that is rounding, which differs with the number of ranks."""


class MessageConfig(Section):
    role: Literal["system", "user", "assistant"]
    """Who says it."""

    content: str
    """What is said."""


class ConversationConfig(Section):
    messages: list[MessageConfig] = Field(min_length=1)
    """The messages up to the user's one that is to be answered, as in a row of a chat file; the first may be a system message."""

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if self.messages[-1].role != "user":
            raise ValueError(
                f"the last message is one of the {self.messages[-1].role}; the model answers the user's: leave the last "
                "ones out, or add a question"
            )
        return self


class EvalConfig(Section):
    every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations. Null: only at the end."""

    at_start: bool = False
    """Evaluate before the first step too."""

    early_stop: EarlyStopConfig | None = None
    """End the run when its evaluations no longer improve: at the same step on any number of ranks, whatever happens in between. Null: it trains to its last step."""

    prompts: list[str | ConversationConfig] = Field(default_factory=list)
    """What the model answers at every evaluation: texts, or conversations such as `{messages: [{role: system, content: Be brief.}, {role: user, content: Who was Ada?}]}`."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of those answers, in tokens."""
