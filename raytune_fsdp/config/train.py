"""`train`, `checkpoint`, `eval`: how much, how often."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.base import Section
from raytune_fsdp.config.rules import checkpoint_place


class TrainConfig(Section):
    global_batch: int = Field(ge=1, le=2**24)
    """Packed samples of one optimizer step, over all ranks and accumulation. What is learned depends on it; on how
    many ranks share it, it does not."""

    micro_batch: int = Field(default=1, ge=1)
    """Packed samples of one forward pass. Must divide `global_batch`."""

    max_steps: int | None = Field(default=None, ge=1)
    """Length of the run in optimizer steps; the data repeats as often as needed."""

    epochs: float | None = Field(default=None, gt=0)
    """Length of the run in passes over the data, in place of `max_steps`."""

    log_every: int = Field(default=1, ge=1)
    """Steps between two looks at the device: metrics of all steps in between are fetched and written together."""

    @model_validator(mode="after")
    def _length_and_batch(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError(
                f"train.max_steps={self.max_steps} and train.epochs={self.epochs}: set exactly one of the two"
            )
        if self.global_batch % self.micro_batch:
            low = self.global_batch // self.micro_batch * self.micro_batch
            near = [str(v) for v in (low, low + self.micro_batch) if v]
            raise ValueError(
                f"train.global_batch={self.global_batch} is not a multiple of train.micro_batch={self.micro_batch}; "
                f"nearest valid: {' or '.join(near)}"
            )
        return self


class CheckpointConfig(Section):
    every: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints. Null: only at the end."""

    storage: Annotated[str, AfterValidator(checkpoint_place)] | None = None
    """Where the checkpoints are, if not in the run's directory: a directory that all machines share, or `s3://bucket/path`, `gs://…`, or what else fsspec opens. They are in `<storage>/<run.name>/checkpoints`; every rank reads and writes its own part there."""

    asynchronous: bool = True
    """Training goes on while a checkpoint is written; it waits only for a copy of its state in host memory, which takes as much memory there. `false` waits for the storage and needs none."""

    timeout_minutes: float = Field(default=30.0, gt=0)
    """A checkpoint that is not written by then is given up; training goes on, and the next one is tried."""

    verify: Literal["hashes", "sizes"] = "hashes"
    """What is compared with the manifest before a run continues from a checkpoint: the content of every file, which all ranks read together, or only the sizes."""

    keep_last: int | None = Field(default=2, ge=2)
    """Newest checkpoints to keep; older ones are deleted after a newer one is complete. Null: all."""

    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that this divides are kept, too."""

    keep_best: int = Field(default=0, ge=0)
    """So many checkpoints whose evaluation was best are kept, too."""

    best: str | None = None
    """What best means: the name of an evaluation's number, such as `eval/<dataset>/loss`. Null: the mean of the losses of all datasets."""

    best_is: Literal["lowest", "highest"] = "lowest"
    """Whether a low number is good."""


class EvalConfig(Section):
    every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations. Null: only at the end."""

    at_start: bool = False
    """Evaluate before the first step too."""

    prompts: list[str] = Field(default_factory=list)
    """Questions that the model answers at every evaluation."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Length of those answers at most."""
