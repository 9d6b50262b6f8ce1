"""`cluster` and `export`: on what it runs, and what it leaves."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.base import Section


class ClusterConfig(Section):
    launch: Literal["auto", "ray", "local"] = "auto"
    """`ray`: on a Ray cluster: the one this process belongs to (`ray job submit`), the one RAY_ADDRESS names or `ray start` has started here, else one that is started on this machine for the run. `local`: processes on this machine, without Ray. `auto`: `local` under torchrun or where Ray is not installed, else `ray`."""

    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Ranks to start. `auto`: one for each GPU of the cluster (with `launch: local`: of this machine), or one where it has none. Under torchrun its world size counts."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a GPU for every worker or where one is asked for by `gpus_per_worker` or `accelerator_type`, else the CPU."""

    cpus_per_worker: int = Field(default=1, ge=1)
    """Ray: logical CPUs each worker reserves. The rest of the cluster's CPUs prepare the data."""

    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Ray: GPUs each worker reserves. `auto`: 1 where it uses one, else 0."""

    accelerator_type: str | None = None
    """Ray: workers only run on nodes with this accelerator, as Ray calls it: `A100`, `H100`, `L4`, …"""

    resources_per_worker: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray: custom resources each worker reserves, such as `{fast_storage: 1}`; `memory` in bytes."""

    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """Ray: how workers are placed on nodes. `pack`: on as few as possible; `spread`: on as many as possible; `strict_pack`: all on one; `strict_spread`: each on its own."""

    env: dict[str, str] = {}
    """Ray: environment variables of the workers, such as `{NCCL_SOCKET_IFNAME: eth0, HF_HUB_OFFLINE: "1"}`. They are shown in Ray's dashboard: no secrets."""

    max_failures: int = Field(default=3, ge=-1)
    """Ray: how often a crash of workers is answered by a new attempt from the newest checkpoint before the run fails. -1: always."""

    wait_minutes: float = Field(default=30.0, gt=0)
    """Ray: how long to wait for the resources of the workers, at the start and after a failure."""


class ExportConfig(Section):
    at_end: bool = True
    """Write a Hugging Face model directory when the run has finished."""

    dtype: Literal["trained", "bf16", "fp16", "fp32"] = "bf16"
    """Type of the exported weights. `trained`: the master weights as they are."""

    max_file_bytes: int = Field(default=5_000_000_000, ge=1_000)
    """Size of a safetensors file at most."""

    every: int | None = Field(default=None, ge=1)
    """Ray: checkpoints of steps that this divides are exported, too, by a task of Ray while training goes on: to `<run>/exports/step-<step>`. A multiple of `checkpoint.every`."""

    push: str | None = None
    """Push the model that is exported at the end to the Hugging Face hub, under this name (`owner/name`). Needs HF_TOKEN."""

    private: bool = True
    """Whether a repository that the push creates is private; `false` leaves that to its owner's account."""

    @model_validator(mode="after")
    def _something_to_push(self) -> Self:
        if self.push is not None and not self.at_end:
            raise ValueError(f"export.push={self.push} pushes the export at the end: set export.at_end=true")
        return self
