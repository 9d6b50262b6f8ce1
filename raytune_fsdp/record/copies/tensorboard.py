"""Write TensorBoard's files of curves into the run's directory, from the record, in a thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytune_fsdp.plan.run_dir import TENSORBOARD
from raytune_fsdp.record.copies.following import Copy, Position
from raytune_fsdp.record.copies.mlflow_run import node_points_of, points_of
from raytune_fsdp.record.tracker import Status


class TensorboardTracker(Copy):
    receiver = "TensorBoard"

    def __init__(self, directory: Path, *, finish_seconds: float = 30.0) -> None:
        self._place = directory / TENSORBOARD
        super().__init__(directory, self._place / "sent.json", finish_seconds=finish_seconds)
        self._file: Any = None
        self._files = 0

    def _open(self, step: int) -> None:
        # Not SummaryWriter: its flush does not wait for the queue before the file.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if self._file is not None:
            self._file.close()
        self._files += 1
        self._place.mkdir(parents=True, exist_ok=True)
        # Files are named by the second, so a second file of the same second would overwrite the first.
        by = f"{'c' if self._start.over else ''}{self._files:04}"
        self._file = EventsWriter(str(self._place / "events"), filename_suffix=f".a{self._start.attempt:04}.{by}")
        # TensorBoard then hides what older files have of this step and later ones.
        self._file.write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, place: Position, line: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        points = [*points_of(line, 0), *node_points_of(line, 0)]
        if points:
            _, _, at, step = points[0]
            values = [Summary.Value(tag=name, simple_value=value) for name, value, _, _ in points]
            self._file.write_event(Event(step=step, wall_time=at / 1000, summary=Summary(value=values)))

    def _flush(self) -> None:
        self._file.flush()

    def _close(self, status: Status) -> None:
        self._file.close()
