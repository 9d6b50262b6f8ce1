"""`reference`: what an objective compares log-probabilities with. `teacher`: whose predictions it learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raytune_fsdp.config.rules import Section, model_place


class ReferenceConfig(Section):
    model: Annotated[str, AfterValidator(model_place)] | None = None
    """The model whose log-probabilities `train.objective` compares with: a directory, a name on the hub, or `base` for
    `model.path` without `method.adapter`. Null: what the run starts from, with `method.adapter` if it begins with one. Python
    code that comes with it runs if `model.trust_remote_code` is set, and belongs to the run."""

    when: Literal["before", "during"] = Field(default="before")
    """When they are computed. `before`: once, before training, and kept beside the prepared data; `during`: in every
    step, by the model without its adapters, or by a second copy of what the run starts from."""


class TeacherConfig(Section):
    model: Annotated[str, AfterValidator(model_place)]
    """The teacher: a directory (an export, or what an earlier pass has kept), a checkpoint of another run, or a name on the
    hub. Its tokenizer must be the run's. Python code that comes with it runs if `model.trust_remote_code` is set, and belongs to
    the run."""

    top_k: int = Field(default=64, ge=1)
    """How many of the most likely tokens are kept for each token that is trained on; of all others, only their sum."""

    temperature: float = Field(default=1.0, gt=0)
    """What the logits of teacher and student are divided by before they are compared. Another temperature needs another
    pass."""

    dtype: Literal["auto", "fp32", "fp64"] = "auto"
    """The type in which probabilities are kept. `auto`: fp32; fp64 with `parallel.precision=fp64`."""

    def kept_in(self, precision: str) -> str:
        """Return the type in which probabilities are kept, for a run of this precision."""
        if self.dtype == "auto":
            return "fp64" if precision == "fp64" else "fp32"
        return self.dtype
