"""What is predicted for a run's ranks before they start, and what is measured of the run: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Which numbers there are after a step, whatever ranks and files they are in."""

    weights: str
    everything: str
    """With the optimizer's state and what decides, besides tensors, how the run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step as it is recorded: its trajectory, and measurements that depend on the machine."""

    step: int
    epoch: float
    samples: str
    """xxh3 of the ordered sample ids of the global batch, in hex."""
    tokens: int
    target_tokens: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    step_seconds: float
    data_seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    accuracy: float | None = None
    """Share of the target tokens that were the model's first choice; None with an objective of groups."""
    datasets: tuple[tuple[str, float, float | None, int], ...] = ()
    """Name, loss, accuracy and target tokens of each dataset in the step, if there are several; with an objective of
    groups, the share of right pairs (None: they are no pairs), and the number of groups."""
    preferences: tuple[tuple[str, float], ...] = ()
    """With an objective of groups: rewards, accuracy of pairs and log-probabilities by name; of what is learned from a
    teacher: divergences from it, and cross-entropy. Those of each dataset have its name before them, if there are
    several."""
    windows_built: int = 0
    """Windows that had to be tokenized for this step, because they were not in the cache."""
    expert_load: tuple[float, ...] = ()
    """For each layer with a mixture of experts: tokens of its busiest expert, over the mean of its experts."""
    experts_idle: int | None = None
    """The number of experts, over all layers, that no token went to."""
    rank_seconds: tuple[float, ...] = ()
    """The step's seconds on the fastest rank, the median and the slowest, if there are several ranks."""
    rank_data_seconds: tuple[float, ...] = ()
    """The seconds that ranks waited for data: lowest, median and highest."""
    rank_compute_seconds: tuple[float, ...] = ()
    """The seconds that the network's units took, without waiting for other ranks: lowest, median and highest."""
    rank_memory_bytes: tuple[int, ...] = ()
    """`memory_bytes` of the rank with the least, the median, and the rank with the most, if there are several."""
    reserved_bytes: int | None = None
    """What torch's allocator has reserved, on the GPU where this is most; None on CPUs."""
    host_memory_bytes: int | None = None
    """Memory in use on the node that uses most."""
    gpu_utilization: float | None = None
    """Utilization in percent of the GPU that is used least; None without NVIDIA's library for it (nvidia-ml-py)."""
    nodes: tuple[tuple[str, float | None, float | None, float | None, float | None], ...] = ()
    """One entry for each node, in at most one step every ten seconds (`run/measure/nodes.py`)."""
    predicted: tuple[float | None, ...] = ()
    """Relative prediction errors (positive: too much was predicted) of what a rank keeps, of its peak, and of a step's
    seconds, in one step of an attempt (`run/measure/against_prediction.py`)."""
    digest: Digest | None = None
    """The digest of what there is after this step, if it was asked for (`run.digest_every`)."""
    exact: bool = False
    """Whether the digest is the same at any number of ranks, and so belongs to the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """How many numbers a network has; shared numbers count once."""

    total: int
    trainable: int

    @property
    def words(self) -> str:
        """The counts as a phrase for people."""
        if self.trainable == self.total:
            return f"{self.total:,} parameters, all of them trained"
        return f"{self.total:,} parameters, {self.trainable:,} of them trained ({self.trainable / self.total:.2%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A committed checkpoint."""

    step: int
    path: str
    """Directory or URL."""
    seconds: float
    """Time from the copy of the state to the commit."""
    bytes: int
    lasting: bool = True
    """False: a recovery point, which only a run that continues uses."""
    digest: Digest | None = None
    """None: its numbers were not hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction of `predict/` for a rank, at one number of ranks."""

    kept: int
    """Bytes of its device that tensors hold from step to step: weights, buffers, the optimizer's state. Exact."""
    peak: int
    """The most bytes of tensors during a step in which every token is trained on."""
    where: str
    """What the rank does at that peak."""
    assumed: int
    """Bytes of the device besides tensors: libraries, and gaps between tensors. Estimated."""
    checkpoint: int
    """Bytes of one checkpoint, of all ranks together."""
    seconds: float | None
    """Seconds of a step; None if nothing is known of the device's speed."""

    @property
    def needed(self) -> int:
        return self.peak + self.assumed


@dataclass(frozen=True, slots=True)
class NotPredicted:
    because: str
