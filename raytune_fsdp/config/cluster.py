"""`cluster` and `export`: on what it runs, and what it leaves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
