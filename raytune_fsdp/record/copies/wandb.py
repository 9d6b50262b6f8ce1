"""Send a run to Weights & Biases, from the record, in a thread. The key is in the environment: WANDB_API_KEY."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytune_fsdp.base.durable import make_private, replace_at_once
from raytune_fsdp.base.redaction import redact
from raytune_fsdp.plan.run_dir import WANDB_ID_FILE
from raytune_fsdp.record.copies.following import Copy, Position, kept_id
from raytune_fsdp.record.copies.mlflow_run import node_points_of, points_of
from raytune_fsdp.record.tracker import Status

# W&B's exit codes: 255 means stopped by a user, any other but 0 a crash.
_EXIT_CODES: dict[Status, int] = {"finished": 0, "failed": 1, "interrupted": 255}
_EVALUATED = "evaluated_step"


class WandbTracker(Copy):
    """Keeps one W&B run per run. W&B's library spools on this machine what its server does not take yet."""

    receiver = "Weights & Biases"

    def __init__(
        self, directory: Path, *, project: str, entity: str | None = None, finish_seconds: float = 30.0
    ) -> None:
        super().__init__(directory, directory / f"{WANDB_ID_FILE}.sent", finish_seconds=finish_seconds)
        self._project = project
        self._entity = entity
        self._run: Any = None
        self._row = 0
        self._given = Position()
        """The furthest that W&B was ever given."""

    def _open(self, step: int) -> None:
        import wandb

        if self._run is not None:
            return  # W&B takes a step again, and keeps the last value of a key
        self._given = self._steps.last_sent()
        file = self._directory / WANDB_ID_FILE
        if not (known := kept_id(file)):
            known = uuid.uuid4().hex
            replace_at_once(file, f"{known}\n".encode())
        make_private(self._directory / "wandb")  # where the library spools the config
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            id=known,
            name=self._start.name,
            dir=str(self._directory),
            config=redact(dict(self._start.params)),
            allow_val_change=True,
            resume="allow",
            # The console goes to our own logs, and the code around us is not for others to see.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )

    def _write(self, place: Position, line: Mapping[str, Any]) -> None:
        is_new, self._given = place > self._given, max(place, self._given)
        if line["kind"] == "eval" and place.step < self._run.step:
            # A run that is resumed there goes on in a new row, and what it is told of the row before is dropped.
            if is_new:
                self._into_open_row(line)
            return
        points = [*points_of(line, 0), *node_points_of(line, 0)]
        if points:
            self._row = points[0][3]
            self._run.log({name: value for name, value, _, _ in points}, step=self._row)

    def _write_late(self, place: Position, line: Mapping[str, Any]) -> None:
        # Not for the few of `_write`: curves over this metric lack the rows that have none.
        self._run.define_metric("eval/*", step_metric=_EVALUATED)
        self._into_open_row(line)

    def _into_open_row(self, line: Mapping[str, Any]) -> None:
        # W&B takes no row of a step before its last one: these values go into the row that is open, with their own step
        # as a metric. Once the run is over, no row is open, and each line gets a row.
        self._run.define_metric(_EVALUATED, hidden=True)
        values = {name: value for name, value, _, _ in points_of(line, 0)}
        step = None if self._start.over else max(self._row, self._run.step)
        self._run.log(values | {_EVALUATED: line["step"]}, step=step)

    def _flush(self) -> None:
        """Do nothing: what was logged is in the library's spool."""

    def _close(self, status: Status) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])
