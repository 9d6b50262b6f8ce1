"""`checkpoint`: when and where a run is saved, and how much of it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.rules import SaveEvery, Section, checkpoint_place


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=1)] | Literal["auto"] | SaveEvery | None = "auto"
    """Steps between two checkpoints. `auto`: by the clock, so that a crash loses little: the first one within ten minutes of training, the others within thirty, later if saving would take more than 2 % of the time. `{minutes: 20}`: by the clock, in other intervals. Checkpoints by the clock are for a crash only: the newest one is kept until there is a newer one of another kind, and nothing is measured or exported from it. The two newest are kept while the run has no other kind and storage has room for two more. Besides these, `auto` saves where `keep_best` or `eval.where: task` needs a checkpoint, and at the end. `{per_epoch: 4}`: four times in every pass over the data (needs `train.epochs`). Null: only at the end, so a crash loses all that was trained."""

    storage: Annotated[str, AfterValidator(checkpoint_place)] | None = None
    """Where checkpoints are kept instead of the run directory: a directory that all machines share, `s3://bucket/path`, `gs://…`, or any other URL that fsspec opens. They go to `<storage>/<run.name>/checkpoints`; every rank reads and writes its own part there."""

    asynchronous: bool = True
    """Write checkpoints while training goes on: it waits only until its state has been copied to host memory, which must have room for the copy. `false`: training waits for the storage, and needs no memory for a copy."""

    timeout_minutes: float = Field(default=30.0, gt=0)
    """Minutes after which an unfinished checkpoint is given up. Training goes on, and the next one is tried."""

    verify: Literal["hashes", "sizes"] = "hashes"
    """What is compared with the manifest before a run continues from a checkpoint. `hashes`: the content of every file; the ranks share the reading. `sizes`: only the sizes."""

    # At least two: if the newest is damaged, the run goes back to the one before.
    keep_last: int | None = Field(default=2, ge=2)
    """How many of the newest checkpoints are kept. Older ones are deleted once a newer one is complete. Null: all are kept."""

    keep_every: int | None = Field(default=None, ge=1)
    """Also keep the checkpoints of steps that are a multiple of this."""

    keep_best: int = Field(default=0, ge=0)
    """Also keep this many checkpoints with the best evaluations."""

    best: str | None = None
    """The metric that decides which evaluation is best, such as `eval/<dataset>/loss`. Null: the mean loss over all datasets."""

    best_is: Literal["auto", "lowest", "highest"] = "auto"
    """Whether the lowest or the highest value of that metric is best. `auto`: the highest of accuracies, `exact_match`, `margins`, `rewards_chosen`, `logps_chosen`, `f1`, `auc`, `r2` and `pearson`, by the end of the metric's name; the lowest of all others."""

    peer_copies: int = Field(default=0, ge=0)
    """How many other nodes keep in memory a copy of what each node's ranks have, between two checkpoints (only on Ray). When ranks or a node are lost, the run goes on from the newest copy of which no part is lost: with 1, after the loss of one node; with 2, of any two. On a single node, after that of ranks. A node needs memory for twice what its ranks save, and as much again for each copy of others'. Copies are gone when the command ends: they replace no checkpoint."""

    peer_every: int | None = Field(default=None, ge=1)
    """Steps between two copies (needs `checkpoint.peer_copies`). Null: by the clock, as often as they take 2 % of the time at most, with five seconds or more between two."""

    @model_validator(mode="after")
    def _check_peers(self) -> CheckpointConfig:
        if self.peer_every is not None and not self.peer_copies:
            raise ValueError(
                f"checkpoint.peer_every={self.peer_every} with checkpoint.peer_copies=0: there are no copies; set "
                "checkpoint.peer_copies=1, or leave peer_every out"
            )
        return self

    @property
    def by_clock(self) -> bool:
        """Whether the clock asks for checkpoints, too."""
        return self.every == "auto" or (isinstance(self.every, SaveEvery) and self.every.minutes is not None)
