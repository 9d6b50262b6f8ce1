"""`cluster` and `export`: on what it runs, and what it leaves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytune_fsdp.config.base import Section


class ClusterConfig(Section):
    launch: Literal["auto", "local"] = "auto"
    """`local`: processes on this machine, or the ones torchrun has started. `auto` is `local` for now."""

    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Processes to start. `auto`: one for each GPU of this machine, or one where it has none. Under torchrun its
    world size counts."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a GPU for every worker, else the CPU."""


class ExportConfig(Section):
    at_end: bool = True
    """Write a Hugging Face model directory when the run has finished."""

    dtype: Literal["trained", "bf16", "fp16", "fp32"] = "bf16"
    """Type of the exported weights. `trained`: the master weights as they are."""

    max_file_bytes: int = Field(default=5_000_000_000, ge=1_000)
    """Size of a safetensors file at most."""
