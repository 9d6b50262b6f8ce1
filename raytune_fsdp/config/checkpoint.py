"""`checkpoint`: how often a run is saved, where, and what is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raytune_fsdp.config.base import Section
from raytune_fsdp.config.rules import checkpoint_place


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
