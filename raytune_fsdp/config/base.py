"""The one base of every config section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config: frozen, strict about names, documented by the docstrings under its fields."""

    # Without allow_inf_nan=False, `lr: .inf` would pass every bound below.

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
