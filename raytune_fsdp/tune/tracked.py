"""The MLflow run of a sweep, below which its trials are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.text import dump
from raytune_fsdp.launch.environment import environment
from raytune_fsdp.launch.quiet import quieting
from raytune_fsdp.plan.run_dir import mlflow_database
from raytune_fsdp.record.copies.following import kept_id
from raytune_fsdp.record.copies.mlflow import mlflow_installed
from raytune_fsdp.record.copies.mlflow_extras import NOTE, SOURCE
from raytune_fsdp.record.copies.mlflow_run import MlflowRun, connect, kept_run
from raytune_fsdp.tune.log import Entry, SweepBegun
from raytune_fsdp.tune.place import SweepDir
from raytune_fsdp.tune.space import run_name_of
from raytune_fsdp.tune.spec import SweepSpec
from raytune_fsdp.tune.table import Standing

T = TypeVar("T")
logger = logging.getLogger(__name__)

_SECONDS = 60.0
"""How long the sweep waits for MLflow: its trials need it only to be below the sweep in its pages."""
_SWEEP, _BEST = "raytune_fsdp.sweep", "raytune_fsdp.best"


class Tracked:
    """Keeps one MLflow run for a sweep. Where MLflow does not answer, the sweep goes on without."""

    def __init__(self, spec: SweepSpec, config: FinetuneConfig) -> None:
        """`config`: of any trial."""
        self._spec, self._place = spec, SweepDir.of(spec)
        chosen = config.tracking.mlflow
        database, artifacts = mlflow_database(self._place.path.parent)
        self._uri, self._experiment = chosen.uri or database, chosen.experiment
        self._artifacts = None if chosen.uri else artifacts
        self._on = chosen.enabled and mlflow_installed()
        self._run: MlflowRun | None = None

    @property
    def id(self) -> str | None:
        return None if self._run is None else self._run.id

    def begin(self) -> None:
        """Find the run, or make it."""
        if self._on:
            self._run = _tried(self._open)

    def end(self, log: Sequence[Entry], best: Standing | None, *, over: bool) -> None:
        """Say how far the sweep has come, and which trial is the best: of several seeds the first, with their mean."""
        if (run := self._run) is None:
            return

        seeds = self._spec.seeds
        mean = f" `sweep/best` is the mean over {seeds} seeds." if seeds > 1 else ""

        def told() -> None:
            begun = next((entry for entry in log if isinstance(entry, SweepBegun)), None)
            run.set_tags({
                _SWEEP: self._spec.name,
                NOTE: f"The sweep {self._spec.name}; its trials are below it.{mean}",
                **({} if best is None else {_BEST: run_name_of(self._spec, best.trial, best.generation)}),
            })  # fmt: skip
            if begun is not None:
                run.add_text(dump(dict(begun.decides)), "sweep.yaml")
            if best is not None and best.value is not None:
                # Now: of equal times MLflow shows the highest value as the last one.
                run.add_points([("sweep/best", best.value, round(1000 * time.time()), 0)], {})
            run.end("FINISHED" if over else "KILLED")

        _tried(told)

    def _open(self) -> MlflowRun:
        with environment(quieting()):
            client, file = connect(self._uri), self._place.mlflow_id
            run = kept_run(
                client, self._uri, file, kept_id(file), experiment=self._experiment, artifact_root=self._artifacts,
                name=self._spec.name, source={**SOURCE, _SWEEP: self._spec.name},
            )  # fmt: skip
            run.set_running()
            return run


def _tried(work: Callable[[], T]) -> T | None:
    """Do this in a thread, for a bounded time. Say what goes wrong, as nothing depends on it."""
    done: Future[T] = in_thread(work, "mlflow")
    try:
        return done.result(_SECONDS)
    except Exception as error:
        why = "it has not answered" if isinstance(error, TimeoutError) else in_one_line(error)
        logger.warning("MLflow does not have all of the sweep: %s; the same command tries it again", why)
        return None
