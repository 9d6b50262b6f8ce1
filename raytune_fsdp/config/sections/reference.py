"""`reference`: what an objective compares log-probabilities with."""

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
