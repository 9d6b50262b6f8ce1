"""`cluster`: what the run runs on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.recorded import filled_from_environment
from raytune_fsdp.config.rules import Section

SPOT_NOTICE_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""How long in advance a cloud announces that it takes a machine away."""


class Between(Section):
    """A number of ranks that may change during the run."""

    min: int = Field(ge=1)
    """The fewest ranks: with fewer, the run waits."""

    max: int = Field(ge=1)
    """The most ranks, which the run has if the cluster has room for them."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is more than max={self.max}: lower min, or raise max")
        return self


class ClusterConfig(Section):
    launch: Literal["auto", "ray", "local"] = "auto"
    """`ray`: run on the Ray cluster that this process belongs to (`ray job submit`), that RAY_ADDRESS names or that `ray start` started here; if there is none, on one that is started on this machine for the run. `local`: run as processes on this machine, without Ray. `auto`: `local` under torchrun or where Ray is not installed, else `ray`."""

    workers: Annotated[int, Field(ge=1)] | Literal["auto"] | Between = "auto"
    """Number of ranks. `auto`: one for each GPU of the cluster that others do not hold (with `launch: local`: of this machine), or one if there is no GPU. Under torchrun, torchrun's world size counts. `{min: 2, max: 8}` (Ray): as many as there is room for; when nodes are lost or added, the run goes on with fewer or more ranks, and learns the same."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if there is a GPU for every worker, or if `gpus_per_worker` or `accelerator_type` asks for one; else the CPU, and with too few GPUs the run says so."""

    cpus_per_worker: int = Field(default=1, ge=1)
    """Ray: logical CPUs each worker reserves. The rest of the cluster's CPUs prepare the data."""

    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Ray: GPUs each worker reserves. `auto`: 1 if it uses one, else 0."""

    accelerator_type: str | None = None
    """Ray: run workers only on nodes with this accelerator, by Ray's name for it: `A100`, `H100`, `L4`, …"""

    resources_per_worker: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray: custom resources each worker reserves, such as `{fast_storage: 1}`; `memory` in bytes."""

    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """Ray: how workers are placed on nodes. `pack`: on as few as possible; `spread`: on as many as possible; `strict_pack`: all on one; `strict_spread`: each on its own."""

    env: Annotated[dict[str, str], AfterValidator(filled_from_environment)] = Field(default={}, repr=False)
    """Ray: environment variables of the workers, such as `{NCCL_SOCKET_IFNAME: eth0, HF_HUB_OFFLINE: "1"}`. What looks like a secret is written to the run directory as `<redacted>`, and a config with that mark takes the variable from the environment. Ray's dashboard shows all values: secrets belong in the environment of `ray start`."""

    fork_workers: bool = True
    """Ray (Linux): fork the workers of the run from a process on each node that has done their imports, so that an attempt after a failure begins seconds earlier. It takes 0.5 GB of memory on each node. In any doubt, such as another environment or code that has changed meanwhile, Ray starts a worker as usual; so it does for jobs whose runtime environment has a Python of its own (`pip`, `uv`, `conda`, containers)."""

    max_failures: int = Field(default=3, ge=-1)
    """Ray: how many crashes of workers are answered with a new attempt from the newest checkpoint before the run fails. -1: no limit."""

    start_seconds: float = Field(default=120.0, gt=0)
    """Ray: seconds that a Ray started for this run may take to start. A very busy machine needs more. Ray's own limits may end a try earlier; another one follows until then."""

    collective_minutes: float = Field(default=30.0, gt=0)
    """Minutes after which a rank that waits for others in a collective gives up. This catches ranks that hang; ranks that die are noticed at once. It must be longer than the slowest start of a rank takes."""

    hang_minutes: Annotated[float, Field(gt=0)] | None = None
    """Ray: minutes without progress in training, evaluation or a save after which the stacks of all ranks are written to `logs/attempt-N/stacks` and another attempt begins. Default: 20 times as long as a step takes, but at least 5 minutes. It applies from the second step of an attempt on; before that, `start_hang_minutes` applies."""

    start_hang_minutes: float = Field(default=10.0, gt=0)
    """Ray: minutes without progress, between the start of the ranks and their second step, after which the stacks are written and another attempt begins. Progress is any rank that reads something, reaches another phase, or advances with weights, a download, a compilation or a step, however long these take. Meanwhile a line per minute names the ranks that the others wait for."""

    spot_notice: Literal["aws", "gcp", "azure", "none"] = "none"
    """Ray: ask this cloud's metadata service on every node of the run whether the machine is about to be taken away (spot, preemptible). If it is, the node is drained: the run commits a checkpoint and goes on elsewhere. AWS gives two minutes, the others half a minute: if a save takes longer, the run says so after its first one."""

    wait_minutes: float = Field(default=30.0, gt=0)
    """Ray: minutes to wait for the workers' resources, at the start and after a failure."""

    @property
    def fewest(self) -> int | None:
        """The least number of ranks that the run may have. None: the hardware decides."""
        return self.workers.min if isinstance(self.workers, Between) else self._number

    @property
    def most(self) -> int | None:
        """The largest number of ranks that the run may have. None: the hardware decides."""
        return self.workers.max if isinstance(self.workers, Between) else self._number

    @property
    def _number(self) -> int | None:
        assert not isinstance(self.workers, Between)
        return None if self.workers == "auto" else self.workers
