"""`export`: the model directory that a run leaves, and where it is pushed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.rules import PerEpoch, Section


class ExportConfig(Section):
    at_end: bool = True
    """Write a Hugging Face model directory when the run has finished."""

    dtype: Literal["trained", "bf16", "fp16", "fp32"] = "bf16"
    """Type of the exported weights. `trained`: the master weights as they are."""

    merge: bool = False
    """If the run trains adapters: merge them into the base, and export the whole model. False: export only the adapters, in
    PEFT's format and fp32."""

    max_file_bytes: int = Field(default=5_000_000_000, ge=1_000)
    """Maximum size of a safetensors file."""

    every: Annotated[int, Field(ge=1)] | PerEpoch | None = None
    """Ray: also export the first checkpoint at or after each multiple of this to `<run>/exports/step-<step>`, in a Ray task while training goes on. Must be a multiple of `checkpoint.every`. `{per_epoch: 1}`: once in every pass over the data (needs `train.epochs`)."""

    push: str | None = None
    """Push the model that is exported at the end to the Hugging Face hub under this name (`owner/name`). Needs HF_TOKEN."""

    private: bool = True
    """Make the repository private if the push creates it. `false`: the settings of its owner's account decide."""

    @model_validator(mode="after")
    def _something_to_push(self) -> Self:
        if self.push is not None and not self.at_end:
            raise ValueError(f"export.push={self.push} pushes the export at the end: set export.at_end=true")
        return self
